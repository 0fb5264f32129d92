"""Requests with a size of their own: answers of a model of that size, beside requests of other sizes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import msrnn
from msrnn.engine.engine import Engine
from msrnn.engine.lanes import LongEngine
from msrnn.engine.requests import Request, SamplingParams
from msrnn.errors import UsageError
from tests.helpers.fake_executor import SIZED, FakeExecutor, answer_to
from tests.helpers.tiny import build, llama, tokens

FIVE = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
TEN = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
HOW: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
PROMPT = [*range(10, 60)]
SIZES = [None, 9, 24, 12]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama(), "cpu")


def text(length: int, seed: int = 1) -> list[int]:
    found: list[int] = tokens(1, length, seed)[0].tolist()
    return found


@cache
def rnn_of(model: PreTrainedModel, size: int, policy: str = "echo", recall: int = 0) -> msrnn.MultiStateRNN:
    return msrnn.MultiStateRNN(model, policy, size, recall=recall, recall_every=8 if recall else 1)


def generate(rnn: msrnn.MultiStateRNN, prompt: Sequence[int], state: Any = None, **how: Any) -> list[int]:
    found: list[int] = rnn.generate(torch.tensor([prompt]), state, **HOW, **how)[0, len(prompt) :].tolist()
    return found


def ask(engine: Engine, prompts: Sequence[Sequence[int]], sizes: Sequence[int | None], **how: Any) -> list[Request]:
    """All at once."""
    params = how.pop("params", TEN)
    requests = [engine.request(one, params, size=size, **how) for one, size in zip(prompts, sizes, strict=True)]
    for request in requests:
        engine.add(request)
    while not engine.idle:
        engine.step()
    assert [answer.error for request in requests for answer in request.answers if answer.error] == []
    return requests


def answers(requests: Sequence[Request]) -> list[list[int]]:
    return [request.answers[0].tokens for request in requests]


@pytest.mark.parametrize(("policy", "recall"), [("echo", 0), ("window+2", 0), ("tova", 6)])
def test_a_batch_of_several_sizes(policy: str, recall: int, model: PreTrainedModel) -> None:
    """Twice: the second time, cached prefixes serve requests, of their own size only."""
    engine = Engine(rnn_of(model, 24, policy, recall), slots=3, prompt_tokens=7, prefix_bytes=2**24)
    prompts = [text(60)] * len(SIZES)
    expected = [generate(rnn_of(model, size or 24, policy, recall), prompts[0]) for size in SIZES]
    assert expected[0] != expected[1] != expected[3]
    for again in (False, True):
        requests = ask(engine, prompts, SIZES)
        assert answers(requests) == expected
        assert all(request.cached_tokens > 0 for request in requests) or not again or recall


def test_answers_to_one_prompt_share_its_size(model: PreTrainedModel) -> None:
    engine = Engine(rnn_of(model, 24), slots=4)
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, n=2)
    (several, _) = ask(engine, [text(60), text(40)], [9, None], params=params)
    assert [answer.tokens for answer in several.answers] == [generate(rnn_of(model, 9), text(60))] * 2


def test_protected_tokens_and_retention_are_of_the_size(model: PreTrainedModel) -> None:
    engine = Engine(rnn_of(model, 24, "window+2"), slots=2)
    request = engine.request(text(5), TEN, size=9, protect="prompt", retention=1)
    engine.add(request)
    events = []
    while not engine.idle:
        events += engine.step()
    assert request.answers[0].tokens == generate(rnn_of(model, 9, "window+2"), text(5), protect="prompt")
    told = [event.retention for event in events if event.retention]
    assert {one.slots for one in told} == {2 * 9}  # of two layers
    assert told[-1].used == 2 * 9
    with pytest.raises(UsageError, match="of 9 KV rows"):
        engine.request(text(12), TEN, size=9, protect="prompt")
    engine.request(text(12), TEN, protect="prompt")


@pytest.mark.parametrize("kept", ["memory", "folder"])
def test_a_session_keeps_its_size(kept: str, model: PreTrainedModel, tmp_path: Path) -> None:
    where = tmp_path if kept == "folder" else None
    engine = Engine(rnn_of(model, 24), slots=2, sessions=where)
    alone = Engine(rnn_of(model, 9), slots=2)
    first = answers(ask(engine, [text(50)], [9], session="talk"))
    assert first == answers(ask(alone, [text(50)], [None], session="talk"))
    ask(engine, [text(50)], [None], session="whole")
    engine.sessions.fork("talk", "twin")
    if where is not None:
        engine = Engine(rnn_of(model, 24), slots=2, sessions=where)  # as after a restart
    for seed, (size, name) in enumerate([(None, "talk"), (9, "talk"), (9, "twin")], 2):
        if name == "talk":
            expected = answers(ask(alone, [text(20, seed)], [None], session="talk"))
        found = answers(ask(engine, [text(20, seed if name == "talk" else 2)], [size], session=name))
        assert found == expected or name == "twin"
        sessions = {info.name: info.size for info in engine.sessions.infos()}
        assert sessions == {"talk": 9, "twin": 9, "whole": None}
    with pytest.raises(UsageError, match=r"size=12: session 'talk' has size 9 .* give 9"):
        engine.request(text(5), TEN, session="talk", size=12)
    with pytest.raises(UsageError, match=r"size=9: session 'whole' has size 24"):
        engine.request(text(5), TEN, session="whole", size=9)
    ask(engine, [text(5)], [24], session="whole")


def test_past_the_training_length(model: PreTrainedModel) -> None:
    """The long lane converts a session, which keeps its size."""

    def make(size: int) -> LongEngine:
        longer = msrnn.MultiStateRNN(model, "echo+1~96", size, positions="compressed")
        return LongEngine(rnn_of(model, size), longer, 80, 4)

    engine, alone = make(24), make(9)
    for prompt in (text(40), text(60, 2)):
        found = answers(ask(engine, [prompt], [9], session="talk"))
        assert found == answers(ask(alone, [prompt], [None], session="talk"))
    assert (engine.long_requests, alone.long_requests) == (1, 1)
    assert answers(ask(engine, [text(90)], [9])) == answers(ask(alone, [text(90)], [None]))


def expected(prompt: list[int], size: int | None) -> list[int]:
    """The fake executor's answers depend on the size of a state."""
    return answer_to([prompt[0] + SIZED * (size or 0), *prompt[1:]], 5)


def test_waiting_prompts_and_cached_prefixes_are_of_one_size() -> None:
    engine = Engine(FakeExecutor(rows=30), prompt_tokens=16, prefix_bytes=2**20)
    sizes = [None, 7, 30, 7, 9, None]
    for again in (False, True):
        requests = ask(engine, [PROMPT] * len(sizes), sizes, params=FIVE)
        assert answers(requests) == [expected(PROMPT, None if size == 30 else size) for size in sizes]
        assert [request.size for request in requests] == [None, 7, None, 7, 9, None]
        assert all(request.cached_tokens == len(PROMPT) for request in requests) or not again
    assert ask(engine, [[*PROMPT, 3]], [8], params=FIVE)[0].cached_tokens == 0


def test_prefixes_of_own_sizes_are_not_written_to_files(tmp_path: Path) -> None:
    engine = Engine(FakeExecutor(rows=30), prefix_bytes=0, prefix_host_bytes=0, prefix_folder=tmp_path)
    ask(engine, [PROMPT], [7], params=FIVE)
    engine.writer.submit(lambda: None).result()
    assert [*tmp_path.iterdir()] == []
    ask(engine, [PROMPT], [None], params=FIVE)
    engine.writer.submit(lambda: None).result()
    assert len([*tmp_path.iterdir()]) > 0
    assert answers(ask(engine, [[*PROMPT, 3]], [7], params=FIVE)) == [expected([*PROMPT, 3], 7)]


@pytest.mark.parametrize("wrong", [0, -1, 31])
def test_a_size_that_does_not_fit_is_refused_before_anything_is_read(wrong: int) -> None:
    executor = FakeExecutor(rows=30)
    with pytest.raises(UsageError, match="from 1 to 30"):
        Engine(executor).request(PROMPT, FIVE, size=wrong)
    assert executor.calls == []
