"""What vLLM allocates for a bounded layer: one block per request, which is the layer's page."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec, FullAttentionSpec

from msrnn.bound import Bound
from msrnn.core.slots import LayerShape
from msrnn.errors import UsageError
from msrnn.integrations.vllm_pages import measure_page

# vLLM counts a block in tokens, and divides positions by it. A page never fills up, so a block has more tokens than any
# request may have.
BLOCK_TOKENS = 2**24


@dataclass(frozen=True, kw_only=True)
class BoundedSpec(CircularBufferSpec):
    """A page per request and layer, whatever the request's length.

    vLLM has a manager for `CircularBufferSpec`: it takes one block when a request begins, frees it when the request
    ends or is preempted, and caches no prefix.
    """

    bound: Bound

    @property
    def shape(self) -> LayerShape:
        """Heads of queries do not count here, and the device only where memory is allocated."""
        return LayerShape(
            heads=self.num_kv_heads,
            kv_heads=self.num_kv_heads,
            key_dim=self.head_size,
            value_dim=self.head_size_v,
            dtype=self.dtype,
            device=torch.device("cpu"),
        )


def bound_spec(spec: AttentionSpec, bound: Bound) -> BoundedSpec:
    """The spec of a bounded layer, from the one that vLLM has for the layer's ordinary attention."""
    if type(spec) is not FullAttentionSpec:
        raise UsageError(
            "only layers with full attention can be bounded in vLLM",
            name="attention",
            value=type(spec).__name__,
            advice="use a model without other layers, or msrnn's own engine",
        )
    like = BoundedSpec(
        block_size=BLOCK_TOKENS,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        dtype=spec.dtype,
        bound=bound,
        num_head_slots=1,
        tokens_per_state=BLOCK_TOKENS,
        state_content_bytes=0,
    )
    return BoundedSpec(**{**vars(like), "state_content_bytes": measure_page(like.shape, bound)})
