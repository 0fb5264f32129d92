"""Attention of one layer in vLLM: every request's new tokens go through the layer's page of that request."""

from __future__ import annotations

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
from msrnn.integrations.vllm_options import read_options
from msrnn.integrations.vllm_pages import Pages


class BoundedAttention(AttentionImpl[BoundedMetadata]):
    """Append, attend, observe and evict, in place of vLLM's attention over a growing cache.

    On a CPU, requests are computed one after the other, each in its own page. On other devices, decode steps are
    computed together.
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
        options = read_options(get_current_vllm_config().additional_config)
        assert options is not None
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.options, self.scoring = options, Scoring(self.scale)
        self._backend: Any = None
        self._pages: Pages | None = None
        self._memory: Tensor | None = None

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
        pages = self.bind(layer, kv_cache)
        for reading in attn_metadata.readings:
            if reading.begin == 0:
                pages.clear(reading.page)
        for tokens, numbers in attn_metadata.divide(together=query.device.type != "cpu"):
            q, k, v = query[tokens], key[tokens], value[tokens]
            if isinstance(numbers, int):
                output[tokens] = pages.read(numbers, q, k, v, self.scoring, self._backend)
            else:
                output[tokens] = pages.step(numbers, q, k, v, self.scoring, self._backend)
        return output

    def do_kv_cache_update(self, *_: Any) -> None:
        """Nothing: `forward` writes the rows."""

    def bind(self, layer: Any, kv_cache: Tensor) -> Pages:
        """The pages that vLLM has allocated for a layer: kv_cache [N, 1, 1, elements of a page]."""
        if self._pages is None or self._memory is not kv_cache:
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
            self._pages = Pages(kv_cache[:, 0, 0].view(torch.uint8), shape, self.options.bound)
            self._memory = kv_cache
        return self._pages


def find_shards(device: torch.device) -> Shards | None:
    """The processes that share the layers' heads (tensor parallelism); None: this one has all of them."""
    group = get_tp_group()
    if group.world_size == 1:
        return None
    backend = "nccl" if device.type == "cuda" else "gloo"
    return ProcessShards(group.device_group, group.rank_in_group, group.world_size, backend)
