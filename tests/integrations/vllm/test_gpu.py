"""vLLM on a GPU: answers are those of `generate` there, launched one by one and in captured graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from msrnn.hf.rnn import MultiStateRNN
from tests.helpers.vllm_engines import draw_prompts, expect_answer, find_layers, open_llm, same_positions, serve
from tests.helpers.vllm_engines import write_model as write

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'msrnn[vllm]'")

from vllm.config import CUDAGraphMode

from msrnn.integrations.vllm.attention import BoundedAttention

pytestmark = pytest.mark.gpu

ANSWER, SIZE = 24, 24
GRAPHS: dict[str, Any] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
LIMITS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write("llama", tmp_path_factory.mktemp("llama"))


def load_rnn(folder: str, policy: str, **more: Any) -> MultiStateRNN:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return MultiStateRNN(model.cuda().eval(), policy, SIZE, **more)


@pytest.mark.parametrize("policy", ["tova", "h2o", "window+4", "echo"])
def test_kernels_launched_one_by_one(folder: str, policy: str) -> None:
    """Requests that arrive at random, are preempted, and begin anew in any page."""
    prompts = draw_prompts(16, longest=200, seed=1)
    with open_llm(folder, {"policy": policy, "size": SIZE}, async_scheduling=False, **LIMITS) as llm:
        assert {type(layer.impl) for layer in find_layers(llm)} == {BoundedAttention}
        found = serve(llm, prompts, ANSWER, preempt_at=(25, 40))
    rnn = load_rnn(folder, policy)
    for prompt, answer in zip(prompts, found.answers, strict=True):
        expected = expect_answer(rnn, prompt, ANSWER)
        assert answer.tokens == expected.tokens
        assert same_positions(answer, expected)


@pytest.mark.parametrize("policy", ["tova", "h2o", "window+4", "echo"])
def test_decode_steps_in_captured_graphs(folder: str, policy: str) -> None:
    """With as many requests as a graph has, and with fewer, where the rest is padding."""
    check_captured(folder, policy, GRAPHS)


def test_a_compiled_model_with_graphs_of_its_parts(folder: str) -> None:
    """What vLLM does unless one asks for something else."""
    check_captured(folder, "tova", {"cudagraph_capture_sizes": [1, 2, 4, 8]})


def check_captured(folder: str, policy: str, compilation: dict[str, Any]) -> None:
    prompts = [*draw_prompts(16, longest=200, seed=2), [5], [6]]
    given = {"enforce_eager": False, "compilation_config": compilation, **LIMITS}
    with open_llm(folder, {"policy": policy, "size": SIZE}, **given) as llm:
        mode = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
        assert mode.decode_mode() == CUDAGraphMode.FULL, mode
        found = serve(llm, prompts, ANSWER, positions=False)
    rnn = load_rnn(folder, policy)
    for prompt, answer in zip(prompts, found.answers, strict=True):
        assert answer.tokens == expect_answer(rnn, prompt, ANSWER).tokens


def test_a_size_that_keeps_everything_is_vllm_alone(folder: str) -> None:
    prompts, answers = draw_prompts(8, longest=200, seed=3), []
    for options in (None, {"policy": "tova", "size": 512}):
        with open_llm(folder, options, attention_backend="TRITON_ATTN", max_num_seqs=8) as llm:
            answers.append([answer.tokens for answer in serve(llm, prompts, ANSWER, positions=False).answers])
    assert answers[0] == answers[1]
