"""Options of a state that depend on each other or on the model: refusals, the backend of a layer, the largest gap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from msrnn.backends import resolve_backend, resolve_scored_backend
from msrnn.backends.base import Backend
from msrnn.bound import Bound
from msrnn.checks import check_count
from msrnn.core.quantization import parse_state_dtype
from msrnn.core.rope import FITTED, Gap, spacing
from msrnn.errors import UsageError
from msrnn.policy import Policy
from msrnn.scored import ScoredPolicy
from msrnn.size import Size


def check_unbounded(state_dtype: str | torch.dtype | None, positions: str | Gap) -> None:
    """Refuse options that policy 'full' does not have."""
    if parse_state_dtype(state_dtype):
        raise UsageError(
            "policy 'full' does not quantize",
            name="state_dtype",
            value=state_dtype,
            advice="use a bounded policy, or leave it out",
        )
    if named := spacing(positions):
        raise UsageError(
            "policy 'full' leaves no gaps",
            name="positions",
            value=named.name,
            advice="use a bounded policy, or leave it out",
        )


def check_partly_bounded(size: Size, quantized: torch.dtype | None, positions: str | Gap) -> None:
    """Refuse options that need a size for every layer."""
    for name, value in (("state_dtype", quantized), ("positions", spacing(positions))):
        if value:
            raise UsageError(f"{name}: needs a size for every layer, and one of size={size.name:.60} is None")


def check_chunk(chunk: int | None) -> None:
    if chunk is not None:
        check_count("chunk", chunk, of="tokens")


def layer_backend(name: str, policy: Policy, bound: Bound | None, device: torch.device) -> Backend:
    """The backend of a layer. A policy with a Python function needs its own, and torch for the layers that slide."""
    if not isinstance(policy, ScoredPolicy):
        return resolve_backend(name, device)
    scored = resolve_scored_backend(name)
    return scored if bound and bound.policy is policy else resolve_backend("torch", device)


def fitting_gap(config: Any, sizes: Sequence[int | None], guests: int = 0) -> int:
    """The largest gap at which the tokens of every layer, a new one and guests always fit the training length."""
    length: int | None = getattr(config, "max_position_embeddings", None)
    size = max((size for size in sizes if size is not None), default=None)
    if not length or size is None:
        reason = "the config of this model has no max_position_embeddings; name a largest gap, as in 'compressed:16'"
        raise UsageError(reason, name="positions", value=FITTED)
    if size + guests >= length:
        reason = f"size={size} does not fit the {length:,} positions of this model; take a smaller size"
        raise UsageError(reason, name="positions", value=FITTED)
    return (length - 1 - guests) // size
