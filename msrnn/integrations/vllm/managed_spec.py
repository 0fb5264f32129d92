"""The spec of a page, and its manager, where vLLM has none for buffers with one block per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from msrnn.bound import Bound


@dataclass(frozen=True, kw_only=True)
class ManagedPageSpec(AttentionSpec):
    """A page per request and layer, whatever the request's length."""

    head_size_v: int
    bound: Bound
    page_bytes: int

    @classmethod
    def make(cls, spec: AttentionSpec, bound: Bound, page_bytes: int, tokens: int) -> ManagedPageSpec:
        return cls(
            block_size=tokens,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            head_size_v=spec.head_size_v,
            dtype=spec.dtype,
            bound=bound,
            page_bytes=page_bytes,
        )

    @property
    def real_page_size_bytes(self) -> int:
        return self.page_bytes

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        return int(self.page_size_bytes)

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        return 1


class PageManager(FullAttentionManager):
    """Takes one block when a request begins, and frees it when the request ends or is preempted. It caches no prefix.

    The number of blocks comes from that of tokens, and a block has more of these than any request.
    """

    supports_fine_grained_hash_lookup = False

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: Sequence[int], *_: Any, **others: Any
    ) -> tuple[tuple[list[Any], ...], int]:
        return tuple([] for _ in kv_cache_group_ids), 0

    def cache_blocks(self, *_: Any, **others: Any) -> None:
        """Nothing: a page is no prefix of a longer text's page."""

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        return 0


KVCacheSpecRegistry.check_kv_cache_spec_registry({})  # vLLM registers its own specs only while there are none
KVCacheSpecRegistry.register(ManagedPageSpec, PageManager)
