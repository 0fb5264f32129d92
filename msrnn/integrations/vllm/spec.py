"""What vLLM allocates for a bounded layer: one block per request, which is the layer's page."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from msrnn.bound import Bound
from msrnn.core.slots import LayerShape
from msrnn.errors import UsageError
from msrnn.integrations.vllm_pages import measure_page

# vLLM counts a block in tokens, and divides positions by it. A page never fills up, so a block has more tokens than any
# request may have.
BLOCK_TOKENS = 2**24
CUSTOMIZED = hasattr(AttentionBackend, "customize_spec")  # by which a backend chooses what is allocated


def _find_spec() -> Any:
    if CUSTOMIZED:
        from msrnn.integrations.vllm.circular_spec import CircularPageSpec

        return CircularPageSpec
    from msrnn.integrations.vllm.managed_spec import ManagedPageSpec

    return ManagedPageSpec


BoundedSpec: Any = _find_spec()


def bound_spec(spec: AttentionSpec, bound: Bound) -> Any:
    """The spec of a bounded layer, from the one that vLLM has for the layer's ordinary attention."""
    if type(spec) is not FullAttentionSpec:
        raise UsageError(
            "only layers with full attention can be bounded in vLLM",
            name="attention",
            value=type(spec).__name__,
            advice="use a model without other layers, or msrnn's own engine",
        )
    shape = LayerShape(
        heads=spec.num_kv_heads,  # those of queries do not count here, and the device only where memory is allocated
        kv_heads=spec.num_kv_heads,
        key_dim=spec.head_size,
        value_dim=spec.head_size_v,
        dtype=spec.dtype,
        device=torch.device("cpu"),
    )
    return BoundedSpec.make(spec, bound, measure_page(shape, bound), BLOCK_TOKENS)
