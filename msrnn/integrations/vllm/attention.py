"""Attention of one layer in vLLM: every request's new tokens go through the layer's page of that request."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from msrnn.backends import resolve_backend
from msrnn.core.scores import Scoring
from msrnn.core.shards import Shards
from msrnn.core.slots import LayerShape
from msrnn.errors import UsageError
from msrnn.hf.tensor_parallel import ProcessShards
from msrnn.integrations.vllm.metadata import BoundedMetadata
from msrnn.integrations.vllm.page_layer import place_page_layer
from msrnn.integrations.vllm.spec import CUSTOMIZED
from msrnn.integrations.vllm_options import read_options
from msrnn.integrations.vllm_pages import Pages


class BoundedAttention(AttentionImpl[BoundedMetadata]):
    """Append, attend, observe and evict, in place of vLLM's attention over a growing cache.

    On a CPU, requests are computed one after the other, each in its own page. On other devices, decode steps are
    computed together, and so are prompts of about the same length.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> None:
        refused = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap or None,
            "attn_type": None if attn_type == AttentionType.DECODER else attn_type,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            **others,
        }
        for name, value in refused.items():
            if value is not None:
                raise UsageError(
                    "a layer of this model has it, and msrnn does not support it in vLLM",
                    name=name,
                    value=value,
                    advice="use another model, or msrnn's own engine",
                )
        config = get_current_vllm_config()
        options = read_options(config.additional_config)
        assert options is not None
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.options, self.scoring = options, Scoring(self.scale)
        self._layers = config.compilation_config.static_forward_context
        self._backend: Any = None
        self._pages: Pages | None = None
        self._memory: weakref.ref[Tensor] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        if not CUSTOMIZED:
            place_page_layer(self._layers, self, self.options.bound)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: BoundedMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query [T, H, D], key and value [T, K, D] of all requests of a step -> output [T, H, Dv], written in place."""
        if output_scale is not None or output_block_scale is not None:
            reason = "vLLM asks for a quantized output, which a bounded layer does not have"
            raise UsageError(
                reason, name="output_scale", advice="compile without the fusion of attention and quantization"
            )
        if attn_metadata is None:  # vLLM measures memory
            return output.zero_()
        if not isinstance(attn_metadata, BoundedMetadata):
            raise TypeError(f"{type(attn_metadata).__name__}: metadata of another attention backend")
        pages, rest = self.bind(layer, kv_cache), (self.scoring, self._backend)
        for one in attn_metadata.readings:
            new = slice(one.start, one.stop)
            output[new] = pages.read(one.page, one.begin, query[new], key[new], value[new], *rest)
        if (steps := attn_metadata.steps) is not None and (n := len(steps.pages)):
            output[:n] = pages.step(steps.pages, steps.position, query[:n], key[:n], value[:n], *rest)
        for some in attn_metadata.prompts:
            q, k, v = (x[some.tokens] for x in (query, key, value))
            found = pages.read_together(some.pages, some.position, q, k, v, *rest)
            output.index_copy_(0, some.targets, found.flatten(0, 1).index_select(0, some.sources))
        return output

    def do_kv_cache_update(self, *_: Any) -> None:
        """Nothing: `forward` writes the rows."""

    def bind(self, layer: Any, kv_cache: Tensor) -> Pages:
        """The pages in the memory that vLLM has allocated for a layer: kv_cache [N, ...].

        The memory is vLLM's: when it drops the tensor, the pages go with it.
        """
        if self._pages is None or self._memory is None or self._memory() is not kv_cache:
            if kv_cache.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("pages would be emptied by every replay: this memory was not used before a capture")
            self._backend = resolve_backend(self.options.backend, kv_cache.device)
            shape = LayerShape(
                heads=self.num_heads,
                kv_heads=self.num_kv_heads,
                key_dim=self.head_size,
                value_dim=layer.head_size_v,
                dtype=kv_cache.dtype,
                device=kv_cache.device,
                shards=find_shards(kv_cache.device),
                layer=extract_layer_index(layer.layer_name),
            )
            self._pages = Pages(view_bytes(kv_cache), shape, self.options.bound)
            self._memory = weakref.ref(kv_cache, self._release)
        return self._pages

    def _release(self, memory: weakref.ref[Tensor]) -> None:
        if self._memory is memory:
            self._pages = self._memory = None


def view_bytes(kv_cache: Tensor) -> Tensor:
    """The bytes [N, bytes of a page] of a KV cache, without a reference to its tensor."""
    if not kv_cache.is_contiguous():
        raise ValueError(f"vLLM has allocated pages with gaps: strides {kv_cache.stride()} of {list(kv_cache.shape)}")
    N, offset = len(kv_cache), kv_cache.storage_offset() * kv_cache.itemsize
    none, page = torch.empty(0, dtype=torch.uint8, device=kv_cache.device), kv_cache.nbytes // N
    return none.set_(kv_cache.untyped_storage(), offset, (N, page), (page, 1))


def find_shards(device: torch.device) -> Shards | None:
    """The processes that share the layers' heads (tensor parallelism); None: this one has all of them."""
    group = get_tp_group()
    if group.world_size == 1:
        return None
    backend = "nccl" if device.type == "cuda" else "gloo"
    return ProcessShards(group.device_group, group.rank_in_group, group.world_size, backend)
