"""vLLM on a GPU: answers are those of `generate` there, launched one by one and in captured graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from msrnn.hf.rnn import MultiStateRNN
from tests.helpers.vllm_engines import LENGTH, Served, draw_prompts, find_differences, find_layers, open_llm, serve
from tests.helpers.vllm_engines import write_model as write

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'msrnn[vllm]'")

from vllm.config import CUDAGraphMode

from msrnn.integrations.vllm.attention import BoundedAttention

pytestmark = pytest.mark.gpu

POLICIES = ("tova", "h2o", "window+4", "echo")
ANSWER, SIZE = 24, 24
GRAPHS: dict[str, Any] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
LIMITS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for each time that a CUDA graph is replayed."""
    graph = torch.cuda.CUDAGraph
    replay, counted = graph.replay, list[Any]()

    def count(self: Any) -> None:
        counted.append(self)
        replay(self)

    monkeypatch.setattr(graph, "replay", count)
    return counted


def check_answers(folder: str, policy: str, prompts: list[list[int]], found: Served, size: int = SIZE) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    rnn = MultiStateRNN(model.cuda().eval(), policy, size)
    differences = find_differences(rnn, prompts, found, ANSWER)
    assert not differences, "\n".join(differences)


@pytest.mark.parametrize("policy", POLICIES)
def test_kernels_launched_one_by_one(folder: str, policy: str, replays: list[Any]) -> None:
    """Requests that arrive at random, are preempted, and begin anew in any page."""
    prompts = draw_prompts(16, longest=200, seed=1)
    with open_llm(folder, {"policy": policy, "size": SIZE}, async_scheduling=False, **LIMITS) as llm:
        assert {type(layer.impl) for layer in find_layers(llm)} == {BoundedAttention}
        found = serve(llm, prompts, ANSWER, preempt_at=(25, 40))
    assert not replays
    assert any(answer.preemptions for answer in found.answers)
    check_answers(folder, policy, prompts, found)


@pytest.mark.parametrize("policy", POLICIES)
def test_decode_steps_in_captured_graphs(folder: str, policy: str, replays: list[Any]) -> None:
    """With as many requests as a graph has, and with fewer, where the rest is padding."""
    prompts = [*draw_prompts(16, longest=200, seed=2), [5], [6]]
    given = {"enforce_eager": False, "async_scheduling": False, "compilation_config": GRAPHS, **LIMITS}
    with open_llm(folder, {"policy": policy, "size": SIZE}, **given) as llm:
        check_mode(llm)
        found = serve(llm, prompts, ANSWER, preempt_at=(25, 60))
    assert len(replays) >= ANSWER
    assert any(answer.preemptions for answer in found.answers)
    check_answers(folder, policy, prompts, found)


def test_a_compiled_model_with_graphs_of_its_parts(folder: str, replays: list[Any]) -> None:
    """What vLLM does by default: it measures memory first, and prepares a step while the last one runs."""
    prompts = [*draw_prompts(16, longest=200, seed=2), [5], [6]]
    graphs = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
    given = {"enforce_eager": False, "compilation_config": graphs, "kv_cache_memory_bytes": None, **LIMITS}
    with open_llm(folder, {"policy": "tova", "size": SIZE}, **given) as llm:
        check_mode(llm)
        found = serve(llm, prompts, ANSWER, positions=False)
    assert len(replays) >= ANSWER
    check_answers(folder, "tova", prompts, found)


def check_mode(llm: Any) -> None:
    mode = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
    assert mode.decode_mode() == CUDAGraphMode.FULL, mode


def test_a_size_that_keeps_everything_is_vllm_alone(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")  # vLLM's own kernel multiplies in tf32 otherwise
    prompts, found = draw_prompts(8, longest=200, seed=3), []
    for options in (None, {"policy": "tova", "size": LENGTH}):
        with open_llm(folder, options, attention_backend="TRITON_ATTN", max_num_seqs=8) as llm:
            found.append(serve(llm, prompts, ANSWER, positions=False))
    for served in found:
        check_answers(folder, "tova", prompts, served, LENGTH)
