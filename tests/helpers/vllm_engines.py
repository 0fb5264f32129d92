"""vLLM's engine in this process, so that a test can choose when requests arrive, and read the pages of the layers."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from msrnn.hf.rnn import MultiStateRNN
from tests.helpers.tiny import FAMILIES, build

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when vLLM is imported
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'msrnn[vllm]'")
torch.set_num_threads(1)  # vLLM takes this function away; tiny products are slower in more threads

# Heads of vLLM's own attention on a CPU have 32 dimensions at least.
SHAPE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
LENGTH = 640  # tokens of a prompt and its answer, at most
PAGES = 9  # one of them is vLLM's null block


class Answer(NamedTuple):
    tokens: list[int]
    positions: list[Tensor]  # of each layer, [G, S]: what is held at the end, -1 where nothing is
    preemptions: int


class Served(NamedTuple):
    answers: list[Answer]
    most_running: int


def write_model(family: str, folder: Path) -> str:
    """A tiny random model in a folder, which vLLM can load."""
    config = FAMILIES[family]()
    for name, value in {**SHAPE, "head_dim": 32}.items():
        setattr(config, name, value)
    build(config).save_pretrained(folder)
    return str(folder)


@contextmanager
def open_llm(model: str, options: dict[str, Any] | None = None, **more: Any) -> Iterator[Any]:
    """vLLM with msrnn's options; None: without msrnn."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    given: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": LENGTH,
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 2**26,
        "max_num_seqs": 16,
        **more,
    }
    if torch.cuda.is_available():
        given.setdefault("gpu_memory_utilization", 0.2)  # other tests may have the rest
    if options is not None:
        given["additional_config"] = {"msrnn": options}
    # vLLM looks at every object of every module when a worker starts, and fails at functions of llvmlite.
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "llvmlite"}
    llm = None
    try:
        llm = LLM(model=model, **given)
        sys.modules.update(hidden)
        yield llm
    finally:
        sys.modules.update(hidden)
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def make_config(model: str, options: dict[str, Any] | None, **more: Any) -> Any:
    """vLLM's configuration, as it makes it of these arguments."""
    from vllm.engine.arg_utils import EngineArgs

    given: dict[str, Any] = {"dtype": "float32", "max_model_len": LENGTH, "skip_tokenizer_init": True, **more}
    if options is not None:
        given["additional_config"] = {"msrnn": options}
    return EngineArgs(model=model, **given).create_engine_config()


def draw_prompts(count: int, longest: int, seed: int = 0, vocabulary: int = 97) -> list[list[int]]:
    """Prompts of random lengths without special tokens."""
    chance = random.Random(seed)
    return [[chance.randrange(3, vocabulary) for _ in range(chance.randint(1, longest))] for _ in range(count)]


def serve(
    llm: Any, prompts: Sequence[list[int]], answer: int, preempt_at: Sequence[int] = (), positions: bool = True
) -> Served:
    """Greedy answers to prompts that arrive at random steps; all running requests are preempted at some steps."""
    from vllm import SamplingParams

    engine, chance = llm.llm_engine, random.Random(1)
    scheduler = engine.engine_core.engine_core.scheduler
    waiting = [(chance.randrange(60), str(number)) for number in range(len(prompts))]
    blocks: dict[str, int] = {}
    preemptions: dict[str, int] = {}
    answers: dict[str, Answer] = {}
    step = most = 0
    while len(answers) < len(prompts):
        for number in [number for arrival, number in waiting if arrival == step]:
            params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
            engine.add_request(number, {"prompt_token_ids": prompts[int(number)]}, params)
        if step in preempt_at:
            engine.reset_prefix_cache(reset_running_requests=True)
        outputs = engine.step() if engine.has_unfinished_requests() else []
        for output in outputs:
            if output.finished:  # no step has used its page since
                number = output.request_id
                tokens = list(output.outputs[0].token_ids)
                held = read_positions(llm, blocks[number]) if positions else []
                answers[number] = Answer(tokens, held, preemptions[number])
        for request in scheduler.running:
            number = request.request_id.partition("-")[0]  # vLLM appends a random part
            blocks[number] = scheduler.kv_cache_manager.get_block_ids(request.request_id)[0][0]
            preemptions[number] = request.num_preemptions
        most, step = max(most, len(scheduler.running)), step + 1
    return Served([answers[str(number)] for number in range(len(prompts))], most)


def read_positions(llm: Any, page: int) -> list[Tensor]:
    """The held positions of each layer in one page."""
    return [layer.impl.bind(layer, layer.kv_cache).view(page).position[0].cpu().clone() for layer in find_layers(llm)]


def find_layers(llm: Any) -> list[Any]:
    """The attention layers that vLLM's runner knows, in the model's order."""
    return [*llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()]


def expect_answer(rnn: MultiStateRNN, prompt: list[int], answer: int) -> Answer:
    """What `generate` answers, and what it holds before the answer's last token."""
    state = rnn.state(batch_size=1)
    given = torch.tensor([prompt], device=rnn.device)
    settings: dict[str, Any] = {"max_new_tokens": answer, "do_sample": False, "eos_token_id": None}
    tokens = rnn.generate(given, **settings)[0, len(prompt) :].tolist()
    rnn.read(torch.tensor([prompt + tokens[:-1]], device=rnn.device), state)
    return Answer(tokens, [state.positions(layer)[0].cpu() for layer in range(rnn.model.config.num_hidden_layers)], 0)


def same_positions(one: Answer, other: Answer) -> bool:
    """Whether the same tokens are held in each group of each layer; their slots may differ."""
    pairs = zip(one.positions, other.positions, strict=True)
    return all(torch.equal(a.sort(-1).values, b.sort(-1).values) for a, b in pairs)


def find_differences(rnn: MultiStateRNN, prompts: Sequence[list[int]], found: Served, answer: int) -> list[str]:
    """Where answers, and what is held if `found` says it, are not those of `generate`; with what explains it."""
    lines = []
    for number, (prompt, given) in enumerate(zip(prompts, found.answers, strict=True)):
        expected = expect_answer(rnn, prompt, answer)
        name = f"request {number} ({len(prompt)} tokens, preempted {given.preemptions} times)"
        if given.tokens != expected.tokens:
            lines.append(f"{name}: {_describe_tokens(rnn, prompt, given.tokens, expected.tokens)}")
        if given.positions and not same_positions(given, expected):
            lines.extend(f"{name}: {line}" for line in _describe_positions(given, expected))
    return lines


def _describe_tokens(rnn: MultiStateRNN, prompt: list[int], given: list[int], expected: list[int]) -> str:
    at = next((i for i, pair in enumerate(zip(given, expected, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return f"{len(given)} tokens instead of {len(expected)}"
    text = torch.tensor([prompt + expected[:at]], device=rnn.device)
    logits = rnn.read(text, rnn.state(batch_size=1))[0, -1]
    ahead = float(logits[expected[at]] - logits[given[at]])
    return f"token {at} of {given} instead of {expected}; the logit of the expected token is larger by {ahead:.2g}"


def _describe_positions(given: Answer, expected: Answer) -> Iterator[str]:
    for layer, pair in enumerate(zip(given.positions, expected.positions, strict=True)):
        for group, (one, other) in enumerate(zip(*pair, strict=True)):
            held, due = set(one.tolist()), set(other.tolist())
            if held != due:
                extra, missing = sorted(held - due), sorted(due - held)
                yield f"layer {layer}, group {group} holds {extra} instead of {missing}"
