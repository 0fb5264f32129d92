"""An RNN that recalls, in the engine: the same tokens as `generate`, however prompts are read, cached and continued."""

from __future__ import annotations

import asyncio
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
from msrnn.recall import QUESTION, SEGMENT, Recall
from tests.helpers.tiny import build, llama, tokens

ANSWER = 7
PARAMS = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
HOW: dict[str, Any] = {"max_new_tokens": ANSWER, "do_sample": False, "eos_token_id": None}
KINDS = [(5, None), (8, 40)]  # recall_every, recall_while_reading


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama(4, 2))


@pytest.fixture(params=KINDS, ids=str, scope="module")
def rnn(model: PreTrainedModel, request: pytest.FixtureRequest) -> msrnn.MultiStateRNN:
    every, reading = request.param
    return msrnn.MultiStateRNN(model, "tova", 16, recall=8, recall_every=every, recall_while_reading=reading)


ONE_KIND = pytest.mark.parametrize("rnn", KINDS[1:], ids=str, indirect=True, scope="module")


def text(length: int, seed: int = 1) -> list[int]:
    found: list[int] = tokens(1, length, seed)[0].tolist()
    return found


def generate(rnn: msrnn.MultiStateRNN, prompt: Sequence[int], state: Any = None, **how: Any) -> list[int]:
    found: list[int] = rnn.generate(torch.tensor([prompt]), state, **HOW, **how)[0, len(prompt) :].tolist()
    return found


@cache
def expected(rnn: msrnn.MultiStateRNN, *prompt: int) -> list[int]:
    """The answer to a prompt alone."""
    return generate(rnn, prompt)


def ask(engine: Engine, *prompts: Sequence[int], **options: Any) -> list[Request]:
    requests = [engine.request(prompt, options.pop("params", PARAMS), **options) for prompt in prompts]
    for request in requests:
        engine.add(request)
    while not all(request.finished for request in requests):
        engine.step()
    assert [request.answers[0].error for request in requests] == [None] * len(requests)
    return requests


def answers(*requests: Request) -> list[list[int]]:
    return [request.answers[0].tokens for request in requests]


def test_answers_of_a_batch_depend_on_recall(model: PreTrainedModel) -> None:
    """Otherwise the tests below could not fail."""
    some = [
        msrnn.MultiStateRNN(model, "tova", 16, recall=rows, recall_while_reading=w)
        for rows, w in ((0, None), (8, None), (8, 16))
    ]
    found = [generate(rnn, text(200)) for rnn in some]
    assert found[0] != found[1] != found[2] != found[0]


@pytest.mark.parametrize("prompt_tokens", [7, 512])
def test_prompts_are_read_as_alone(rnn: msrnn.MultiStateRNN, prompt_tokens: int) -> None:
    prompts = [text(length) for length in (1, 64, 65, 203)]
    engine = Engine(rnn, slots=3, prompt_tokens=prompt_tokens)
    assert answers(*ask(engine, *prompts)) == [expected(rnn, *prompt) for prompt in prompts]


def test_prompts_with_a_common_prefix(rnn: msrnn.MultiStateRNN) -> None:
    """Questions of several lengths after one document, and prompts that end in it, twice each."""
    document, engine = text(150), Engine(rnn, slots=2, prompt_tokens=33)
    prompts = [[*document, *text(length, 10 + length)] for length in (5, 64, 90)]
    prompts += [document, document[:120]]
    alone = [expected(rnn, *prompt) for prompt in prompts]
    assert answers(*ask(engine, *prompts)) == alone
    again = [ask(engine, prompt)[0] for prompt in prompts]
    assert answers(*again) == alone
    assert all(0 < request.cached_tokens <= len(request.prompt) - QUESTION for request in again[:4])


def test_a_conversation_that_is_sent_again(rnn: msrnn.MultiStateRNN) -> None:
    engine, talk = Engine(rnn, slots=2, prompt_tokens=33), text(150)
    for turn in range(3):
        (request,) = ask(engine, talk)
        assert answers(request) == [expected(rnn, *talk)]
        assert (request.cached_tokens > 60) == (turn > 0)
        talk = [*talk, *request.answers[0].tokens, *text(30, len(talk))]


@ONE_KIND
def test_without_a_prefix_cache_nothing_is_shared(rnn: msrnn.MultiStateRNN) -> None:
    engine = Engine(rnn, slots=2, prefix_bytes=0, prefix_host_bytes=0)
    for _ in range(2):
        (request,) = ask(engine, text(203))
        assert answers(request) == [expected(rnn, *text(203))]
        assert request.cached_tokens == 0


def test_offline_prompts_share_a_document(rnn: msrnn.MultiStateRNN) -> None:
    document, engine = text(300), Engine.offline(rnn, slots=2)
    prompts = [[*document, *text(length, 10 + length)] for length in (5, 70, 8)]
    found = engine.generate(prompts, PARAMS, progress=False)
    assert answers(*found) == [expected(rnn, *prompt) for prompt in prompts]
    assert sorted(request.cached_tokens >= 192 for request in found) == [False, True, True]


@ONE_KIND
def test_turns_of_a_session(rnn: msrnn.MultiStateRNN, overlaps: bool, tmp_path: Path) -> None:
    """Each turn is what `generate` makes of the state after the turn before; a new engine continues from files.

    The engine before it is not closed, as if it was killed.
    """
    state, engines = rnn.state(), []
    for turn, length in enumerate((100, 3, 90)):
        engine = Engine(rnn, slots=2, prompt_tokens=40, sessions=tmp_path)
        prompt = text(length, turn)
        asked = ask(engine, prompt, session="talk")
        assert answers(*asked) == [generate(rnn, prompt, state)]
        engines.append(engine)
    for engine in engines:
        engine.close()


@ONE_KIND
def test_sessions_of_one_engine_and_their_forks(rnn: msrnn.MultiStateRNN) -> None:
    engine, states = Engine(rnn, slots=2, prompt_tokens=40), {"a": rnn.state(), "b": rnn.state()}
    for turn, name in enumerate("aba"):
        prompt = text(70, turn)
        assert answers(*ask(engine, prompt, session=name)) == [generate(rnn, prompt, states[name])]
    engine.sessions.fork("a", "c")
    states["c"] = states["a"].fork(1)
    for name in "ca":
        prompt = text(20, ord(name))
        assert answers(*ask(engine, prompt, session=name)) == [generate(rnn, prompt, states[name])]


@ONE_KIND
def test_protected_prompts(rnn: msrnn.MultiStateRNN) -> None:
    engine = Engine(rnn, slots=2, prompt_tokens=7)
    prompt = text(14)
    for protect in ("prompt", "none", "prompt"):
        request = engine.request(prompt, PARAMS, protect=protect)
        engine.add(request)
        while not request.finished:
            engine.step()
        assert answers(request) == [generate(rnn, prompt, protect=protect)]


def test_protected_beginnings_do_not_depend_on_chunks_and_the_cache(rnn: msrnn.MultiStateRNN) -> None:
    found = []
    for width in (5, 512):
        engine = Engine(rnn, slots=2, prompt_tokens=width, prefix_bytes=2**24)
        for _ in range(2):
            found += answers(*ask(engine, text(150), protect=10))
    assert all(one == found[0] for one in found)


def test_log_probabilities_of_prompts(rnn: msrnn.MultiStateRNN) -> None:
    prompt, params = text(100), SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    engine = Engine(rnn, slots=2, prompt_tokens=21)
    ask(engine, prompt)
    (request,) = ask(engine, prompt, params=params)
    state, recall, logits, begin = rnn.state(), rnn.prompt_recall, [], 0
    assert recall is not None
    for end, how in recall.parts(len(prompt)):
        every = None if how is None else how.every
        logits.append(rnn.read(torch.tensor([prompt[begin:end]]), state, recall_every=every)[0])
        begin = end
    wanted = torch.cat(logits)[:-1].log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    found = torch.tensor([one.chosen for one in request.prompt_logprobs if one is not None])
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@ONE_KIND
def test_several_answers_and_a_slot_that_is_used_again(rnn: msrnn.MultiStateRNN) -> None:
    engine = Engine(rnn, slots=3, prompt_tokens=512)
    alone = expected(rnn, *text(100))
    many = SamplingParams(n=3, max_tokens=ANSWER, temperature=0, ignore_eos=True)
    (request,) = ask(engine, text(100), params=many)
    assert [answer.tokens for answer in request.answers] == [alone] * 3
    cancelled, other = engine.request(text(90, 5), PARAMS), engine.request(text(70, 6), PARAMS)
    engine.add(cancelled)
    engine.add(other)
    while not cancelled.answers[0].tokens:
        engine.step()
    cancelled.cancel()
    while not other.finished:
        engine.step()
    assert answers(other) == [expected(rnn, *text(70, 6))]
    assert answers(*ask(engine, text(100))) == [alone]


@ONE_KIND
def test_slots_that_are_not_in_use_have_no_archive(rnn: msrnn.MultiStateRNN) -> None:
    engine = Engine(rnn, slots=3)
    ask(engine, text(64), text(1))
    state: Any = engine.executor
    assert state.batch.state.archive_nbytes == 0


@ONE_KIND
def test_streams(rnn: msrnn.MultiStateRNN) -> None:
    engine, prompts = Engine(rnn, slots=2), [text(64), text(65), text(1)]

    async def stream(prompt: list[int]) -> list[int]:
        return [event.token async for event in engine.stream(prompt, PARAMS) if event.token is not None]

    async def together() -> list[list[int]]:
        return await asyncio.gather(*map(stream, prompts))

    found = asyncio.run(together())
    engine.close()
    assert found == [expected(rnn, *prompt) for prompt in prompts]


def test_cached_prefixes_on_disk_serve_the_same_recall_only(model: PreTrainedModel, tmp_path: Path) -> None:
    def make(reading: int | None) -> Engine:
        rnn = msrnn.MultiStateRNN(model, "tova", 16, recall=8, recall_every=8, recall_while_reading=reading)
        return Engine(rnn, slots=1, prefix_bytes=0, prefix_host_bytes=0, prefix_folder=tmp_path)

    cached = []
    for reading in (40, 40, None, None):
        engine = make(reading)
        executor: Any = engine.executor
        (request,) = ask(engine, text(203))
        assert answers(request) == [generate(executor.rnn, text(203))]
        cached.append(request.cached_tokens)
        engine.close()
    assert cached == [0, 120, 0, 128]


def test_a_session_continues_in_the_long_lane(model: PreTrainedModel) -> None:
    short, long, other = (
        msrnn.MultiStateRNN(model, "tova", 16, recall=rows, recall_every=8, positions=positions)
        for rows, positions in ((8, "original"), (8, "compressed"), (4, "compressed"))
    )
    with pytest.raises(ValueError, match="another number of rows"):
        LongEngine(short, other, 150, slots=4)
    engine = LongEngine(short, long, 150, slots=4, prompt_tokens=30)
    (talk,) = answers(*ask(engine, text(90), session="talk"))
    assert talk == generate(short, text(90))
    state = short.state()
    short.read_prompt(torch.tensor([text(90)]), state, None)
    for token in talk[:-1]:
        short.step(torch.tensor([[token]]), state)
    state = long.convert_state(state)
    long.step(torch.tensor([talk[-1:]]), state)  # a session reads the last token of an answer with the next turn
    assert answers(*ask(engine, text(80, 2), session="talk")) == [generate(long, text(80, 2), state)]
    assert engine.long_requests == 1


@ONE_KIND
def test_bytes_of_sessions_count_their_archives(rnn: msrnn.MultiStateRNN) -> None:
    one, row = rnn.state().nbytes, rnn.spec.archived_row_nbytes
    engine = Engine(rnn, slots=2, session_bytes=2 * one + 200 * row)
    for name in "abc":
        ask(engine, text(70), session=name)
    names = [info.name for info in engine.sessions.infos()]
    assert names == ["c", "b"]
    read = 70 + ANSWER - 1
    assert engine.sessions.nbytes == 2 * (one + read * row)
    ask(engine, text(60), session="c")  # which grows, so that there is no room for the other
    assert [info.name for info in engine.sessions.infos()] == ["c"]
    too_long = engine.request(text(300), PARAMS, session="d")
    engine.add(too_long)
    while not too_long.finished:
        engine.step()
    assert too_long.answers[0].error_code == "session_storage_full"
    assert "do not fit" in str(too_long.answers[0].error)


@ONE_KIND
def test_archives_are_counted_while_they_are_in_use(rnn: msrnn.MultiStateRNN) -> None:
    engine = Engine(rnn, slots=2, prefix_bytes=0, prefix_host_bytes=0)
    request = engine.request(text(64), PARAMS)
    engine.add(request)
    while len(request.answers[0].tokens) < 3:
        engine.step()
    executor: Any = engine.executor
    assert engine.archived_tokens == 66
    assert engine.archive_nbytes == executor.batch.state.archive_nbytes == 66 * rnn.spec.archived_row_nbytes


@pytest.fixture(scope="module")
def limited(model: PreTrainedModel) -> msrnn.MultiStateRNN:
    """Its archives have 2,048 tokens at most."""
    row = msrnn.MultiStateRNN(model, "tova", 16, recall=8).spec.archived_row_nbytes
    return msrnn.MultiStateRNN(model, "tova", 16, recall=Recall(8, 5, limit=2 * SEGMENT * row))


def test_tokens_that_full_archives_drop_are_counted(limited: msrnn.MultiStateRNN) -> None:
    engine = Engine(limited, slots=2, prefix_bytes=0, prefix_host_bytes=0)
    request, row = engine.request(text(2046), PARAMS), limited.spec.archived_row_nbytes
    engine.add(request)
    executor: Any = engine.executor
    found = []
    while not request.finished:
        engine.step()
        found.append((engine.archived_tokens, engine.dropped_tokens))
        if engine.counts.running:
            assert engine.archive_nbytes == engine.archived_tokens * row == executor.batch.state.archive_nbytes
    assert (2048, 0) in found
    assert (1025, 1024) in found
    assert engine.dropped_tokens == 1024
    ask(engine, text(3000), text(3100))
    assert engine.dropped_tokens == 1024 + 1024 + 2048


def test_a_session_with_a_full_archive_takes_no_more_bytes(limited: msrnn.MultiStateRNN) -> None:
    one, row = limited.state().nbytes, limited.spec.archived_row_nbytes
    engine = Engine(limited, slots=1, session_bytes=one + 2 * SEGMENT * row + 4096)
    for turn in (1500, 1000, 900):
        ask(engine, text(turn), session="talk")
    info = engine.sessions.info("talk")
    assert info is not None
    assert (info.tokens, engine.dropped_tokens) == (1500 + 1000 + 900 + 3 * ANSWER, 2 * SEGMENT)
    read = info.tokens - 1  # the last one is read with the next turn
    assert engine.sessions.nbytes == one + (read - 2 * SEGMENT) * row
