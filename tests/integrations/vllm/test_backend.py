"""msrnn's backend: what it needs, and that the plug-in leaves other versions of vLLM alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.vllm_engines import make_config, write_model

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'msrnn[vllm]'")

import vllm
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec

from msrnn.errors import UsageError
from msrnn.integrations.vllm import register
from msrnn.integrations.vllm.attention import BoundedAttention
from msrnn.integrations.vllm.backend import BoundedBackend, Chosen
from msrnn.integrations.vllm.spec import BoundedSpec

OPTIONS = {"policy": "tova", "size": 512}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model("llama", tmp_path_factory.mktemp("llama"))


def test_registering_twice_is_registering_once() -> None:
    register()
    first = AttentionBackendEnum.CPU_ATTN.get_class()
    register()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is first
    assert issubclass(first, CPUAttentionBackend)
    assert AttentionBackendEnum.CUSTOM.get_class() is BoundedBackend


def test_other_versions_of_vllm_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    AttentionBackendEnum.CPU_ATTN.clear_override()
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    register()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is CPUAttentionBackend
    monkeypatch.undo()
    register()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is not CPUAttentionBackend


def test_the_backend_that_is_asked_for_by_name_needs_the_option(folder: str) -> None:
    with set_current_vllm_config(make_config(folder, None)), pytest.raises(UsageError, match="needs a policy"):
        BoundedBackend.get_impl_cls()
    with set_current_vllm_config(make_config(folder, OPTIONS)):
        assert BoundedBackend.get_impl_cls() is BoundedAttention
        spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
        assert isinstance(BoundedBackend.customize_spec(spec), BoundedSpec)


def test_the_options_are_those_of_the_model_that_is_loaded(folder: str) -> None:
    found: list[Any] = []
    for options in (OPTIONS, None, {**OPTIONS, "size": 16}):
        with set_current_vllm_config(make_config(folder, options)):
            found.append(Chosen.find())
        assert Chosen.find() == found[-1]  # also where vLLM shows no configuration
    assert [one and one.bound.size for one in found] == [512, None, 16]
