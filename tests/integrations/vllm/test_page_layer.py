"""The layer that takes the place of vLLM's, where a backend cannot choose what is allocated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.vllm_engines import vllm  # so that vLLM's settings are read as the other tests need them

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'msrnn[vllm]'")

from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from msrnn.errors import UsageError
from msrnn.integrations.vllm.page_layer import PageLayer, place_page_layer
from msrnn.integrations.vllm.spec import BoundedSpec
from msrnn.integrations.vllm_options import Options

BOUND = Options.parse({"policy": "tova", "size": 16}).bound
HEADS: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}


def make_layer(impl: Any, spec: Any) -> Any:
    """What is asked of vLLM's layer."""
    return SimpleNamespace(
        impl=impl,
        layer_name="model.layers.0.self_attn.attn",
        attn_type="decoder",
        num_heads=4,
        head_size_v=32,
        kv_cache=torch.tensor([]),
        get_attn_backend=lambda: "backend",
        get_kv_cache_spec=lambda config: spec,
    )


def test_only_the_layer_of_an_implementation_is_replaced() -> None:
    mine, other = object(), object()
    layers: dict[str, Any] = {"a": make_layer(mine, FullAttentionSpec(**HEADS)), "b": make_layer(other, None)}
    kept = layers["b"]
    place_page_layer(layers, mine, BOUND)
    first = layers["a"]
    place_page_layer(layers, mine, BOUND)  # vLLM may ask again, when weights are loaded again
    assert layers == {"a": first, "b": kept}
    assert isinstance(first, PageLayer)
    assert (first.impl, first.num_heads, first.head_size_v) == (mine, 4, 32)
    assert first.get_attn_backend() == "backend"
    spec = first.get_kv_cache_spec(None)
    assert type(spec) is BoundedSpec
    assert spec.bound == BOUND
    assert vllm.__version__


def test_layers_of_other_kinds_are_refused() -> None:
    layers: dict[str, Any] = {"a": make_layer("impl", SlidingWindowSpec(sliding_window=64, **HEADS))}
    place_page_layer(layers, "impl", BOUND)
    with pytest.raises(UsageError, match="only layers with full attention can be bounded"):
        layers["a"].get_kv_cache_spec(None)
