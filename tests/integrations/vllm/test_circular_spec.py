"""A page where vLLM has a spec for buffers with one block per request."""

from __future__ import annotations

import pytest
import torch

import tests.helpers.vllm_engines  # noqa: F401 — so that vLLM's settings are read as the other tests need them

pytest.importorskip("msrnn.integrations.vllm.circular_spec", reason="this vLLM has no such spec", exc_type=ImportError)

from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from msrnn.integrations.vllm.circular_spec import CircularPageSpec
from msrnn.integrations.vllm.spec import BoundedSpec, bound_spec
from msrnn.integrations.vllm_options import Options


def test_vllm_has_a_manager_for_it() -> None:
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    spec = bound_spec(full, Options.parse({"policy": "tova", "size": 16}).bound)
    assert type(spec) is CircularPageSpec is BoundedSpec
    assert KVCacheSpecRegistry.get_manager_class(spec) is CircularBufferManager
    assert not spec.prefix_cacheable
