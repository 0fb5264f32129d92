"""Eviction policies: which state a bounded layer evicts. A policy has seven fields; a name stands for their values.

This module does not use torch: backends, slots, evaluations and the command line all use the same `Policy` value.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any, Literal

from msrnn.budget import load_budget
from msrnn.checks import check_count, is_number, is_whole
from msrnn.errors import UsageError

Size = int | Sequence[int | None] | None  # rows of every layer, or of each; None: all rows stay


@dataclass(frozen=True)
class Policy:
    """An eviction policy: of the states that are not protected, the least important one is evicted.

    importance <- decay * importance + attention of the newest query; `decay=None`: importance is the position itself.
    """

    decay: float | None
    per: Literal["layer", "head"] = "layer"  # which heads evict the same token: all of a layer, or those of one KV head
    first: int = 0  # the first tokens of a sequence, which are never evicted (attention sinks)
    recent: int | float = 0  # the newest tokens, which are not evicted; a float is a share of the size, rounded down
    value_norm: bool = False  # whether states are ranked by importance times the norm of their value vector
    horizon: int | None = None  # tokens that are not among the last `horizon` are evicted, except the `first`
    budget: str | None = None  # how the size, then a mean, is divided among the layers: a name or a file; None: equally

    def __post_init__(self) -> None:
        if self.decay is not None and not (is_number(self.decay) and 0 <= self.decay <= 1):
            raise UsageError("must be None or a number from 0 to 1", name="decay", value=self.decay)
        if self.per not in ("layer", "head"):
            raise UsageError("must be 'layer' or 'head'", name="per", value=self.per)
        check_count("first", self.first, 0, of="tokens")
        if is_whole(self.recent):
            if self.recent < 0:
                raise UsageError("must be 0 or more tokens", name="recent", value=self.recent)
        elif not (is_number(self.recent) and 0 <= self.recent < 1):
            raise UsageError(
                "must be a number of tokens, or a share of the size in [0, 1)", name="recent", value=self.recent
            )
        if not isinstance(self.value_norm, bool):
            raise UsageError("must be True or False", name="value_norm", value=self.value_norm)
        if self.horizon is not None and (not is_whole(self.horizon) or self.horizon < 2):
            raise UsageError("must be None or a whole number of tokens, 2 or more", name="horizon", value=self.horizon)
        if self.budget is not None:
            if not isinstance(self.budget, str):
                raise UsageError("must be None, a name or a file", name="budget", value=self.budget)
            load_budget(self.budget)
        if self.value_norm and self.decay is None:
            raise UsageError(
                "with decay=None there is no importance to multiply by the norm",
                name="value_norm",
                value=True,
                advice="give a decay from 0 to 1",
            )
        # Equal policies have equal names.
        if self.decay is not None:
            object.__setattr__(self, "decay", float(self.decay))
        if isinstance(self.recent, float):
            object.__setattr__(self, "recent", float(self.recent))
        if self.recent == 0:
            object.__setattr__(self, "recent", 0)

    @classmethod
    def parse(cls, name: str) -> Policy:
        """Read a policy's name. Upper and lower case mean the same.

        A name is one of `NAMES`. "NAME+I" also protects the first I tokens, and "NAME~H" evicts every other token
        that is not among the last H. "NAME:BUDGET" gives the layers different sizes: a name of `msrnn.budget`, or a
        file that `msrnn budget` wrote. Fields work as well: "decay=0.9,recent=0.25,value_norm=1"; fields that are not
        given are 0, and `per` is "layer".
        """
        if not isinstance(name, str):
            raise TypeError(f"policy name {name!r}: must be a string such as 'tova' or 'window+4'")
        head, colon, budget = name.partition(":")
        if is_full(head):
            raise UsageError("policy 'full' evicts nothing and is not a Policy: pass policy='full' to MultiStateRNN")
        if "=" in head:
            return _parse_fields(name)
        rest, tilde, horizon = head.lower().partition("~")
        base, plus, first = rest.partition("+")
        if base in NAMES and (not plus or first.isdecimal()) and (not tilde or horizon.isdecimal()):
            far = int(horizon) if tilde else None
            return replace(NAMES[base], first=int(first or 0), horizon=far, budget=budget if colon else None)
        near = difflib.get_close_matches(base, [*NAMES, FULL], n=1)
        hint = (
            f"did you mean {near[0]!r}?"
            if near and near[0] != base
            else "numbers must follow '+' and '~', as in 'tova+4~4096'"
        )
        if not near:
            hint = "use one of " + ", ".join([FULL, *NAMES]) + ", or NAME+I to protect the first I tokens"
        raise UsageError(f"unknown policy {name!r}: {hint}")

    def recent_at(self, size: int) -> int:
        """The number of newest tokens protected at this size."""
        if isinstance(self.recent, int):
            return self.recent
        numerator, denominator = _ratio(self.recent)
        return numerator * size // denominator

    @property
    def name(self) -> str:
        """The shortest name of this policy, or its fields."""
        for name, value in NAMES.items():
            if replace(value, first=self.first, horizon=self.horizon, budget=self.budget) == self:
                first = f"+{self.first}" if self.first else ""
                horizon = f"~{self.horizon}" if self.horizon is not None else ""
                budget = f":{self.budget}" if self.budget is not None else ""
                return f"{name}{first}{horizon}{budget}"
        numbers = f"decay={self.decay},per={self.per},first={self.first},recent={self.recent}"
        more = [
            ",value_norm=1" if self.value_norm else "",
            f",horizon={self.horizon}" if self.horizon is not None else "",
            f",budget={self.budget}" if self.budget is not None else "",
        ]
        return numbers + "".join(more)

    @property
    def numbers(self) -> dict[str, Any]:
        """What identifies results under this policy: its fields, and what the file of its budget holds."""
        fields = asdict(self)
        if fields["budget"] is None:
            del fields["budget"]
        elif content := load_budget(fields["budget"]).content:
            fields["budget"] = content
        return fields


@cache
def _ratio(share: float) -> tuple[int, int]:
    """The decimal number as it was written: 0.29 is 29 / 100, so that 0.29 of 100 is 29, not 28."""
    return Fraction(repr(share)).as_integer_ratio()


NAMES: dict[str, Policy] = {
    "window": Policy(decay=None),
    "h2o": Policy(decay=1.0, per="head", recent=0.5),
    "h2o-layer": Policy(decay=1.0, recent=0.5),
    "tova": Policy(decay=0.0),
    "tova-head": Policy(decay=0.0, per="head"),
    "echo": Policy(decay=0.98, recent=0.4, value_norm=True),
}
MEANINGS: dict[str, str] = {
    "window": "evicts the oldest token (Longformer, Beltagy et al. 2020)",
    "h2o": "evicts the least attention summed over time, per KV head (H2O, Zhang et al. 2023)",
    "h2o-layer": "evicts the least attention summed over time, one choice per layer (H2O, Zhang et al. 2023)",
    "tova": "evicts the least attention of the newest token, one choice per layer (TOVA, Oren et al. 2024)",
    "tova-head": "evicts the least attention of the newest token, per KV head (TOVA, Oren et al. 2024)",
    "echo": "evicts the least decayed sum of attention times the norm of the value vector",
}
FULL = "full"


def is_full(name: object) -> bool:
    """Whether a policy's name means the unbounded model."""
    return isinstance(name, str) and name.lower() == FULL


def same_ranking(one: str, other: str) -> bool:
    """Whether two policies differ at most in `first` and `horizon`: then one can continue from the other's state."""
    if is_full(one) or is_full(other):
        return is_full(one) and is_full(other)
    return replace(Policy.parse(one), first=0, horizon=None) == replace(Policy.parse(other), first=0, horizon=None)


def _yes_or_no(text: str) -> bool:
    if text not in ("0", "1"):
        raise UsageError("must be 0 or 1", name="value_norm", value=text)
    return text == "1"


_FIELD_PARSERS: dict[str, Callable[[str], Any]] = {
    "decay": lambda text: None if text == "none" else float(text),
    "per": str,
    "first": int,
    "recent": lambda text: int(text) if text.isdecimal() else float(text),
    "value_norm": _yes_or_no,
    "horizon": lambda text: None if text == "none" else int(text),
    "budget": lambda text: None if text == "none" else text,
}


def _parse_fields(name: str) -> Policy:
    fields: dict[str, Any] = {}
    try:
        for field, _, text in (part.partition("=") for part in name.split(",")):
            field, text = field.lower(), text if field.lower() == "budget" else text.lower()
            if field not in _FIELD_PARSERS:
                raise UsageError(f"unknown field {field!r}, use one of {', '.join(_FIELD_PARSERS)}")
            if field in fields:
                raise UsageError(f"{field} is given twice")
            fields[field] = _FIELD_PARSERS[field](text)
        return Policy(**{"decay": 0.0, **fields})
    except ValueError as error:
        raise UsageError(f"policy {name!r}: {error}; write it as decay=0.9,per=layer,first=0,recent=0.25") from error


@dataclass(frozen=True)
class Bound:
    """What one layer may hold: at most `size` states, chosen by `policy`, and how far back a query sees."""

    policy: Policy
    size: int
    window: int | None = None  # tokens that a query sees, its own included: a sliding window, or the policy's horizon
    spared: int = 0  # first tokens that a query sees even outside the window

    @property
    def recent(self) -> int:
        return self.policy.recent_at(self.size)

    @property
    def slots(self) -> int:
        """One more than the size, so that a new token always finds a free slot."""
        return self.size + 1

    def groups(self, kv_heads: int) -> int:
        return kv_heads if self.policy.per == "head" else 1


def resolve(policy_: str | Policy, size: Size) -> tuple[Policy | None, Size]:
    """Check a policy and a size; (None, None) is the unbounded model, policy "full"."""
    if is_full(policy_):
        return None, None
    value = policy_ if isinstance(policy_, Policy) else Policy.parse(policy_)
    if not isinstance(size, Sequence) or isinstance(size, str):
        check_size(value, size)
        return value, size
    if value.budget is not None:
        raise UsageError(
            f"budget {value.budget!r} divides a mean size",
            name="size",
            value=size,
            advice="give one number, or no budget",
        )
    if all(one is None for one in size):
        raise UsageError(
            "bounds no layer", name="size", value=size, advice="give a number for one of them, or use policy 'full'"
        )
    for layer, one in enumerate(size):
        if one is not None:
            try:
                check_size(value, one)
            except (UsageError, TypeError) as error:
                raise type(error)(f"layer {layer}: {error}") from error
    return value, tuple(size)


def check_size(value: Policy, size: object) -> None:
    """Refuse a size that the policy cannot have."""
    if not is_whole(size):
        raise TypeError(f"size={size!r}: must be a whole number of states; only policy 'full' has no size")
    assert isinstance(size, int)
    if size < 1:
        raise UsageError("must be at least 1 token", name="size", value=size)
    recent = value.recent_at(size)
    if value.first + recent >= size:
        raise UsageError(
            f"first={value.first} and recent={recent} protect {value.first + recent} tokens, "
            f"which must be fewer than size={size}: use a larger size, or protect fewer tokens"
        )
    if value.horizon is not None and value.horizon <= size:
        raise UsageError(
            f"horizon={value.horizon} at size={size}: the horizon must be larger than the size; "
            "use a larger horizon, or policy 'window'"
        )


def refuse_budget(name: str, reason: str) -> None:
    """Refuse a policy with a budget where layers must have one size."""
    if not is_full(name) and (budget := Policy.parse(name).budget) is not None:
        raise UsageError(f"policy {name!r}: {reason}; leave out :{budget}")


def layer_sizes(policy_: Policy | None, size: Size, windows: Sequence[int | None], linear: Sequence[bool]) -> list[Any]:
    """The size of each layer; None: it is not bounded. A budget divides the size among the layers without a window."""
    count = len(windows)
    if policy_ is None or size is None:
        return [None] * count
    if not isinstance(size, int):
        if len(size) != count:
            raise UsageError(f"size: {len(size)} numbers, but this model has {count} layers; give one number for each")
        return list(size)
    sizes: list[Any] = [size] * count
    if policy_.budget is None:
        return sizes
    chosen = divided_layers(windows, linear)
    for i, one in zip(chosen, load_budget(policy_.budget).sizes(size, len(chosen)), strict=True):
        try:
            check_size(policy_, one)
        except UsageError as error:
            raise UsageError(f"budget {policy_.budget!r} at size={size}, layer {i}: {error}") from error
        sizes[i] = one
    return sizes


def divided_layers(windows: Sequence[int | None], linear: Sequence[bool]) -> list[int]:
    """The layers that a budget is divided among: those without a sliding window; all with states where each slides."""
    states = [i for i, one in enumerate(linear) if not one]
    return [i for i in states if windows[i] is None] or states


def layer_bound(policy_: Policy | None, size: int | None, window: int | None) -> Bound | None:
    """The bound of one layer; None: it is not bounded.

    A sliding-window layer whose window fits the size evicts only tokens outside its window. Such a layer never sees
    tokens outside its window, even if the policy protects them.
    """
    if window is not None and (size is None or window - 1 <= size):
        return Bound(NAMES["window"], window - 1)
    if policy_ is None or size is None:
        return None
    if policy_.horizon is None or (window is not None and window <= policy_.horizon):
        return Bound(policy_, size, window)
    return Bound(policy_, size, policy_.horizon, spared=policy_.first if window is None else 0)
