"""Which backend a layer gets: vLLM's own without the option, and msrnn's with it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.helpers.vllm_engines import draw_prompts, find_layers, make_config, open_llm, serve, write_model

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'msrnn[vllm]'")

import vllm
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec

from msrnn.errors import UsageError
from msrnn.integrations.vllm import register
from msrnn.integrations.vllm.attention import BoundedAttention
from msrnn.integrations.vllm.backend import BoundedBackend, CPUBackend
from msrnn.integrations.vllm.spec import BoundedSpec

OPTIONS = {"policy": "tova", "size": 512}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """vLLM's loggers pass nothing on to the root, where pytest listens."""
    logger = logging.getLogger("vllm")
    with caplog.at_level(logging.INFO, "vllm"):
        logger.addHandler(caplog.handler)
        yield caplog
        logger.removeHandler(caplog.handler)


def specs(llm: Any) -> list[Any]:
    [found] = llm.collective_rpc("get_kv_cache_spec")
    return list(found.values())


def test_registering_twice_is_registering_once() -> None:
    register()
    register()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is CPUBackend
    assert AttentionBackendEnum.CUSTOM.get_class() is BoundedBackend


def test_other_versions_of_vllm_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    AttentionBackendEnum.CPU_ATTN.clear_override()
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    register()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is CPUAttentionBackend
    monkeypatch.undo()
    register()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is CPUBackend


def test_where_the_option_needs_a_backends_name_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog_vllm: pytest.LogCaptureFixture
) -> None:
    register()
    assert "CUSTOM" not in caplog_vllm.text
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    register()
    assert "with --attention-backend CUSTOM only" in caplog_vllm.text


def test_a_size_that_keeps_everything_is_vllm_alone(folder: str) -> None:
    """Models with and without the option, one after the other in one process."""
    prompts, answers = draw_prompts(12, longest=300), []
    for options in (None, OPTIONS, None):
        with open_llm(folder, options) as llm:
            answers.append([answer.tokens for answer in serve(llm, prompts, 24, positions=False).answers])
            kinds = {type(layer.impl) for layer in find_layers(llm)}
            assert kinds == {BoundedAttention if options else CPUAttentionBackendImpl}
            assert {type(spec) for spec in specs(llm)} == {BoundedSpec if options else FullAttentionSpec}
    assert answers[0] == answers[1] == answers[2]


def test_without_the_option_all_is_vllms_own(folder: str) -> None:
    with set_current_vllm_config(make_config(folder, None)):
        assert CPUBackend.get_impl_cls() is CPUAttentionBackendImpl
        assert CPUBackend.get_builder_cls() is CPUAttentionMetadataBuilder
        spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
        assert CPUBackend.customize_spec(spec) is spec
    assert CPUBackend.get_name() == CPUAttentionBackend.get_name()


def test_the_backend_that_is_asked_for_by_name_needs_the_option(folder: str) -> None:
    with set_current_vllm_config(make_config(folder, None)), pytest.raises(UsageError, match="needs a policy"):
        BoundedBackend.get_impl_cls()
    with set_current_vllm_config(make_config(folder, OPTIONS)):
        assert BoundedBackend.get_impl_cls() is BoundedAttention
