"""A page, and its manager, where vLLM has none for buffers with one block per request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.vllm_engines import draw_prompts, open_llm, vllm, write_model

if hasattr(pytest.importorskip("vllm.v1.kv_cache_interface"), "CircularBufferSpec"):
    pytest.skip(f"vLLM {vllm.__version__} has a manager for it", allow_module_level=True)

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from msrnn.integrations.vllm.managed_spec import ManagedPageSpec, PageManager
from msrnn.integrations.vllm.spec import BoundedSpec, bound_spec
from msrnn.integrations.vllm_options import Options


def test_it_is_registered_beside_vllms_own() -> None:
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    spec = bound_spec(full, Options.parse({"policy": "tova", "size": 16}).bound)
    assert type(spec) is ManagedPageSpec is BoundedSpec
    assert KVCacheSpecRegistry.get_manager_class(spec) is PageManager
    assert KVCacheSpecRegistry.get_manager_class(full) is FullAttentionManager


def test_a_request_has_one_block_from_its_beginning_to_its_end(tmp_path: Any) -> None:
    """Also with prefix caching, of two requests with one prompt; and all blocks are free afterwards."""
    prompt = draw_prompts(1, longest=200, seed=5)[0] * 2
    given: dict[str, Any] = {"enable_prefix_caching": True, "num_gpu_blocks_override": 5, "max_num_batched_tokens": 32}
    with open_llm(write_model("llama", tmp_path), {"policy": "tova", "size": 16}, **given) as llm:
        engine = llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        manager = scheduler.kv_cache_manager
        params = vllm.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
        for number in ("a", "b"):
            engine.add_request(number, {"prompt_token_ids": prompt}, params)
        seen = set()
        while engine.has_unfinished_requests():
            engine.step()
            blocks = [manager.get_block_ids(request.request_id)[0] for request in scheduler.running]
            assert all(len(one) == 1 for one in blocks)
            seen |= {block for [block] in blocks}
        assert len(seen) == 2
        assert manager.block_pool.get_num_free_blocks() == 4  # all but the null block
