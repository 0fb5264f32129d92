"""The bound of one layer: how many KV rows it has, which policy chooses them, and how far back a query sees."""

from __future__ import annotations

from dataclasses import dataclass

from msrnn.errors import UsageError
from msrnn.policy import NAMES, Policy
from msrnn.recall import Recall


@dataclass(frozen=True)
class Bound:
    """The bound of one layer: at most `size` KV rows, chosen by `policy`, and how far back a query sees."""

    policy: Policy
    size: int
    window: int | None = None  # tokens that a query sees, its own included: a sliding window, or the policy's horizon
    sliding: bool = (
        False  # whether the layer slides: no query sees a token outside the window, not even a protected one
    )
    recall: Recall | None = None  # evicted rows are archived, and recalled; None: they are gone

    @property
    def spared(self) -> int:
        """First tokens that a query sees even outside the window."""
        return 0 if self.sliding else self.policy.first

    @property
    def protects(self) -> bool:
        """Whether protected tokens are never chosen. A layer that holds its whole sliding window chooses the oldest."""
        return not self.sliding or self.window is not None

    @property
    def recent(self) -> int:
        return self.policy.recent_at(self.size)

    @property
    def slots(self) -> int:
        """One more than the size, so that a new token always finds a free slot."""
        return self.size + 1

    @property
    def guests(self) -> int:
        """Recalled rows of each KV head."""
        return self.recall.rows if self.recall else 0

    def groups(self, kv_heads: int) -> int:
        return kv_heads if self.policy.per == "head" else 1


def check_size(policy: Policy, size: int) -> None:
    """Refuse a number of KV rows that the policy cannot have."""
    recent = policy.recent_at(size)
    if policy.first + recent >= size:
        raise UsageError(
            f"first={policy.first} and recent={recent} protect {policy.first + recent} tokens, "
            f"which must be fewer than size={size}: use a larger size, or protect fewer tokens"
        )
    if policy.horizon is not None and policy.horizon <= size:
        raise UsageError(
            f"horizon={policy.horizon} at size={size}: the horizon must be larger than the size; "
            "use a larger horizon, or policy 'window'"
        )


def layer_bound(policy: Policy, size: int | None, window: int | None) -> Bound | None:
    """The bound of one layer; None: it is not bounded.

    A sliding-window layer whose window fits the size evicts only tokens outside its window. Such a layer never sees
    tokens outside its window, even if the policy protects them.
    """
    if window is not None and (size is None or window - 1 <= size):
        return Bound(NAMES["window"], window - 1, sliding=True)
    if not policy.evicts or size is None:
        return None
    sliding = window is not None
    if policy.horizon is None or (window is not None and window <= policy.horizon):
        return Bound(policy, size, window, sliding)
    return Bound(policy, size, policy.horizon, sliding)
