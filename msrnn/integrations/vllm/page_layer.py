"""A layer that allocates pages, for versions of vLLM whose backends cannot choose what is allocated.

vLLM's runner finds layers by their names, to ask what to allocate, and to compute attention. So a layer of our own
takes the name of vLLM's, which the model keeps: that one only prepares queries, keys and values.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from msrnn.bound import Bound
from msrnn.integrations.vllm.spec import bound_spec


class PageLayer(AttentionLayerBase):
    def __init__(self, layer: Any, bound: Bound) -> None:
        self.impl, self.layer_name, self.attn_type = layer.impl, layer.layer_name, layer.attn_type
        self.num_heads, self.head_size_v = layer.num_heads, layer.head_size_v
        self.kv_cache = layer.kv_cache  # vLLM sets it when it has allocated
        self._layer, self._bound = layer, bound

    def get_attn_backend(self) -> Any:
        return self._layer.get_attn_backend()

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return bound_spec(self._layer.get_kv_cache_spec(vllm_config), self._bound)


def place_page_layer(layers: dict[str, Any], impl: Any, bound: Bound) -> None:
    """Put it in the place of the layer that computes by `impl`, in the layers that vLLM's runner knows."""
    for name, layer in [*layers.items()]:
        if getattr(layer, "impl", None) is impl and not isinstance(layer, PageLayer):
            layers[name] = PageLayer(layer, bound)
