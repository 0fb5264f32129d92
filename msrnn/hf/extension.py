"""Past the training length: the one rule for the policy and the positions of a state that reads farther than that.

The rule is what docs/results/extrapolation.md found best. This module does not load torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from msrnn.checks import is_whole
from msrnn.errors import UsageError
from msrnn.policy import Policy
from msrnn.size import joint_name, parse_policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from msrnn.hf.state_spec import StateSpec

REACH = 4  # the horizon, in multiples of the size: measured at size 512, with training lengths of 8,192 and 32,768
COMPRESSED = "compressed"


class Extension(NamedTuple):
    """The policy's name and the positions with which a state continues past the training length."""

    policy: str
    positions: str = COMPRESSED


def training_length(model: PreTrainedModel) -> int | None:
    """The longest text that the model was trained on, in tokens; None if its config does not state it."""
    config: Any = model.config.get_text_config(decoder=True)
    length = getattr(config, "max_position_embeddings", None)
    return length if is_whole(length) and length > 0 else None


def largest_size(spec: StateSpec) -> int:
    """The KV rows of the largest layer among those that a budget is divided among; 0 with policy full."""
    return max((spec.sizes[i] or 0 for i in spec.divided), default=0)


def extension(policy: str | Policy, size: int, length: int) -> Extension:
    """The policy with its first token protected and a horizon, and compressed positions.

    Under a budget, which the name keeps, `size` is that of the largest layer: a horizon must be larger than the size of
    every layer. Raises a UsageError where the rule cannot hold.
    """
    value, budget = parse_policy(policy)
    return Extension(joint_name(extend_policy(value, size, length), budget))


def extend_policy(policy: Policy, size: int, length: int) -> Policy:
    """The policy with its first token protected and a horizon, at the size of the largest layer.

    The horizon is four times the size, or the training length where that is less: then all positions are among those
    that the model was trained on. A horizon that the policy has already stays. Raises a UsageError where the rule
    cannot hold: policy full evicts nothing, and a size as large as the training length leaves no room for a horizon.
    """
    if not policy.evicts:
        raise UsageError(f"policy {policy.name!r} keeps every token; use a bounded policy, such as echo")
    if size >= length:
        raise UsageError(
            f"size={size} is not below the {length:,} tokens that this model was trained on; use a smaller size"
        )
    horizon = min(REACH * size, length) if policy.horizon is None else policy.horizon
    return replace(policy, first=max(1, policy.first), horizon=horizon)
