"""The spec of a page where vLLM has one for buffers with one block per request."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec

from msrnn.bound import Bound


@dataclass(frozen=True, kw_only=True)
class CircularPageSpec(CircularBufferSpec):
    """A page per request and layer, whatever the request's length.

    vLLM has a manager for `CircularBufferSpec`: it takes one block when a request begins, frees it when the request
    ends or is preempted, and caches no prefix.
    """

    bound: Bound

    @classmethod
    def make(cls, spec: AttentionSpec, bound: Bound, page_bytes: int, tokens: int) -> CircularPageSpec:
        return cls(
            block_size=tokens,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            head_size_v=spec.head_size_v,
            dtype=spec.dtype,
            bound=bound,
            num_head_slots=1,
            tokens_per_state=tokens,
            state_content_bytes=page_bytes,
        )
