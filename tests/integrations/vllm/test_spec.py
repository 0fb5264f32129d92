"""What vLLM allocates for a bounded layer."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from tests.helpers.vllm_engines import make_config, write_model

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'msrnn[vllm]'")

from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from msrnn.errors import UsageError
from msrnn.integrations.vllm.spec import BoundedSpec, bound_spec
from msrnn.integrations.vllm_options import Options

HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}


def make_spec(policy: str = "tova", size: int = 16) -> BoundedSpec:
    bound = Options.parse({"policy": policy, "size": size}).bound
    return bound_spec(FullAttentionSpec(block_size=16, **HEADS), bound)


def test_one_page_per_request_of_any_length(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = make_config(write_model("llama", tmp_path_factory.mktemp("llama")), {"policy": "tova", "size": 16})
    spec = make_spec()
    for length in (1, 600, 1_000_000):
        assert spec.max_num_blocks_per_req(config, length) == 1
    assert spec.max_memory_usage_bytes(config) == spec.page_size_bytes
    rows, position = 2 * 2 * 17 * 32 * 4, 17 * 4
    assert rows + position <= spec.page_size_bytes <= rows + position + 5 * 64


def test_the_page_has_what_the_policy_needs() -> None:
    sizes = [make_spec(policy).page_size_bytes for policy in ("window", "h2o-layer", "echo")]
    assert sizes == sorted(set(sizes))
    assert make_spec(size=32).page_size_bytes > make_spec(size=16).page_size_bytes


def test_layers_of_one_size_are_one_group() -> None:
    assert BoundedSpec.merge([make_spec(), make_spec()]) == make_spec()
    with pytest.raises(AssertionError):
        BoundedSpec.merge([make_spec(size=16), make_spec(size=17)])


def test_it_travels_between_processes() -> None:
    assert pickle.loads(pickle.dumps(make_spec("echo"))) == make_spec("echo")


def test_other_kinds_of_layers_are_refused() -> None:
    sliding = SlidingWindowSpec(block_size=16, sliding_window=64, **HEADS)
    with pytest.raises(UsageError, match="only layers with full attention can be bounded"):
        bound_spec(sliding, Options.parse({"policy": "tova", "size": 16}).bound)
