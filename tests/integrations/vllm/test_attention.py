"""Answers of vLLM with bounded layers are those of `generate`, token for token, and the same tokens are held."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from msrnn.hf.rnn import MultiStateRNN
from tests.helpers.vllm_engines import PAGES, draw_prompts, find_differences, open_llm, serve, write_model

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'msrnn[vllm]'")

from msrnn.integrations.vllm import metadata

POLICIES = ("tova", "h2o", "window+4", "echo")
SIZES = (16, 33, 64)
CHUNKS = (16, 64, 512)
TINY = ("llama", "qwen2", "qwen3")
ANSWER = 24
# Every policy with every family, size and chunk, and every pair of them.
SQUARE = [(i, j, (i + j) % 3) for i in range(3) for j in range(3)]
CASES = [
    pytest.param(policy, TINY[i], SIZES[j], CHUNKS[k], id=f"{policy}-{TINY[i]}-{SIZES[j]}-{CHUNKS[k]}")
    for policy in POLICIES
    for i, j, k in SQUARE
]


def load_rnn(folder: str, policy: str, size: int) -> MultiStateRNN:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return MultiStateRNN(model.eval(), policy, size)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {family: write_model(family, tmp_path_factory.mktemp(family)) for family in TINY}


@pytest.mark.parametrize(("policy", "family", "size", "chunk"), CASES)
def test_requests_that_arrive_at_random(
    folders: dict[str, str], policy: str, family: str, size: int, chunk: int
) -> None:
    """32 requests in 8 pages. All running requests are preempted again and again, and begin anew in any page."""
    prompts = draw_prompts(32, longest=300, seed=size)
    limits = {"num_gpu_blocks_override": PAGES, "max_num_batched_tokens": chunk}
    with open_llm(folders[family], {"policy": policy, "size": size}, **limits) as llm:
        found = serve(llm, prompts, ANSWER, preempt_at=(25, 40, 41, 60, 90))
    assert 2 < found.most_running < PAGES
    assert sum(answer.preemptions for answer in found.answers) > 8
    rnn = load_rnn(folders[family], policy, size)
    assert not find_differences(rnn, prompts, found, ANSWER)


def test_every_other_policy(folders: dict[str, str]) -> None:
    for policy in ("h2o-layer", "tova-head", "random", "tova+2~60", "decay=0.9,per=head,recent=0.25,value_norm=1"):
        prompts = draw_prompts(8, longest=200)
        with open_llm(folders["llama"], {"policy": policy, "size": 24}) as llm:
            found = serve(llm, prompts, ANSWER)
        rnn = load_rnn(folders["llama"], policy, 24)
        assert not find_differences(rnn, prompts, found, ANSWER), policy


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_in_batches(folders: dict[str, str], policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: decode steps as one batch, which vLLM puts first, and prompts in padded batches."""
    monkeypatch.setattr(metadata, "reads_together", lambda _: True)
    prompts = [*draw_prompts(24, longest=300, seed=4), [5], [6]]
    limits = {"num_gpu_blocks_override": PAGES, "max_num_batched_tokens": 64}
    with open_llm(folders["llama"], {"policy": policy, "size": 24}, **limits) as llm:
        found = serve(llm, prompts, ANSWER, preempt_at=(25, 40, 60))
    assert found.most_running > 2
    rnn = load_rnn(folders["llama"], policy, 24)
    assert not find_differences(rnn, prompts, found, ANSWER)
