"""Past the training length: long requests are as by hand with the longer RNN, and short ones as without it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import msrnn
from msrnn.core.state_file import load_description
from msrnn.engine.decode_batch import fitting_slots
from msrnn.engine.lanes import LongEngine
from msrnn.engine.requests import Request
from msrnn.errors import UsageError
from tests.helpers.tiny import build, llama

LENGTH, ANSWER = 64, 6
TURNS = [[*range(5, 25)], [*range(30, 45)], [50, 51, 52], [*range(60, 80)], [80], [*range(3, 60)]]
Pair = tuple[msrnn.MultiStateRNN, msrnn.MultiStateRNN]


@pytest.fixture(scope="module")
def pair() -> Pair:
    model = build(llama(max_position_embeddings=LENGTH, eos_token_id=None), "cpu")
    longer = msrnn.MultiStateRNN(model, "tova+1~36", 9, positions="compressed")
    return msrnn.MultiStateRNN(model, "tova", 9), longer


def make(pair: Pair, slots: int = 4, **options: Any) -> LongEngine:
    return LongEngine(*pair, LENGTH, slots, **options)


def params(**changes: Any) -> msrnn.SamplingParams:
    return msrnn.SamplingParams(**{"temperature": 0, "max_tokens": ANSWER, **changes})


def ask(engine: msrnn.Engine, prompt: list[int], session: str | None = None, **changes: Any) -> Request:
    request = engine.request(prompt, params(**changes), session)
    engine.add(request)
    while not engine.idle:
        engine.step()
    return request


def tokens(request: Request) -> list[int]:
    assert request.answers[0].error is None, request.answers[0].error
    return request.answers[0].tokens


def by_hand(pair: Pair, turns: Sequence[list[int]], overlaps: bool) -> tuple[list[list[int]], list[bool]]:
    """Answers, and whether each used the longer RNN: converted before the turn that may pass the length."""
    rnn, state, unread = pair[0], pair[0].state(), list[int]()
    answers, crossed = [], []
    for turn in turns:
        if rnn is pair[0] and int(state.seen[0]) + len(unread) + len(turn) + ANSWER > LENGTH:
            rnn, state = pair[1], pair[1].convert_state(state)
        logits = rnn.read(torch.tensor([[*unread, *turn]]), state, last_only=True)
        answer = [int(logits[0, -1].argmax())]
        while len(answer) < ANSWER:
            answer.append(int(rnn.step(torch.tensor([answer[-1:]]), state)[0, -1].argmax()))
        unread = [] if overlaps else answer[-1:]
        if overlaps:  # a step that overlaps the last one has read it
            rnn.step(torch.tensor([answer[-1:]]), state)
        answers.append(answer)
        crossed.append(rnn is pair[1])
    return answers, crossed


def test_a_session_crosses_the_length(pair: Pair, overlaps: bool) -> None:
    told: list[int] = []
    engine: LongEngine = make(pair, on_long=lambda: told.append(engine.sessions.turns("talk")))
    expected, crossed = by_hand(pair, TURNS, overlaps)
    found, positions = [], []
    for turn in TURNS:
        found.append(tokens(ask(engine, turn, "talk")))
        positions.append(engine.sessions.infos()[0].positions)
    assert found == expected
    assert positions == ["compressed:lnln" if long else "original" for long in crossed]
    assert told == [crossed.index(True)]
    assert 0 < told[0] < len(TURNS) - 1
    assert engine.long_requests == len(TURNS) - told[0]
    plain = msrnn.Engine(pair[0], slots=1)
    assert [tokens(ask(plain, turn, "talk")) for turn in TURNS] != found  # so the test can fail


def test_a_restart_after_each_turn(pair: Pair, overlaps: bool, tmp_path: Path) -> None:
    found = []
    for turn in TURNS:
        engine = make(pair, sessions=tmp_path)
        found.append(tokens(ask(engine, turn, "talk")))
        engine.close()
    assert found == by_hand(pair, TURNS, overlaps)[0]
    described = load_description(tmp_path / "talk.safetensors")
    assert (described["policy"], described["positions"]) == ("tova+1~36", "compressed:lnln")


def test_a_session_that_might_have_passed_stays_converted(pair: Pair) -> None:
    """The answer ends at its first token, and the conversation would fit again."""
    engine = make(pair)
    ask(engine, TURNS[0], "talk", max_tokens=60, stop_token_ids=range(97))
    assert engine.sessions.infos()[0].tokens < LENGTH // 2
    assert engine.long_requests == 1
    tokens(ask(engine, [5], "talk", max_tokens=1))
    assert engine.long_requests == 2


def test_a_fork_and_its_origin_go_on_alike(pair: Pair, overlaps: bool) -> None:
    engine = make(pair)
    for turn in TURNS[:-1]:
        ask(engine, turn, "talk")
    engine.sessions.fork("talk", "other")
    expected = by_hand(pair, TURNS, overlaps)[0][-1]
    assert [tokens(ask(engine, TURNS[-1], name)) for name in ("talk", "other")] == [expected, expected]


@pytest.mark.usefixtures("overlaps")
def test_long_and_short_prompts_beside_each_other(pair: Pair) -> None:
    """At the very length, a request is short."""
    prompts = [[*range(3, 3 + count)] for count in (7, 80, LENGTH - ANSWER, LENGTH - ANSWER + 1, 30, 90, 12)]
    engine = make(pair)
    found = [tokens(request) for request in engine.generate(prompts, params(), progress=False)]
    expected = []
    for prompt in prompts:
        rnn = pair[len(prompt) + ANSWER > LENGTH]
        ids = torch.tensor([prompt])
        expected.append(rnn.generate(ids, max_new_tokens=ANSWER, do_sample=False)[0, len(prompt) :].tolist())
    assert found == expected
    assert engine.long_requests == 3


def test_a_long_prompt_that_is_sent_again_is_kept(pair: Pair, tmp_path: Path) -> None:
    """Also in a folder of its own, when memory has no room."""
    engine = make(pair, prefix_bytes=0, prefix_host_bytes=0, prefix_folder=tmp_path)
    prompt = [*range(3, 93)]
    first = ask(engine, prompt)
    assert first.cached_tokens == 0
    engine.writer.close()
    again = ask(engine, [*prompt, *tokens(first), 5])
    assert again.cached_tokens >= len(prompt)
    alone = msrnn.Engine(pair[1], slots=1, prefix_bytes=0, prefix_host_bytes=0)
    assert tokens(again) == tokens(ask(alone, [*again.prompt]))


def test_one_session_answers_one_request_at_a_time_over_both_lanes(pair: Pair) -> None:
    engine = make(pair)
    short = engine.request([5, 6], params(), "talk")
    long = engine.request([7], params(max_tokens=70), "talk")
    for request in (short, long):
        engine.add(request)
    while not engine.idle:
        engine.step()
    assert [request.answers[0].error is None for request in (short, long)] == [True, False]
    assert "is answering another request" in str(long.answers[0].error)


def test_a_session_that_was_replaced_while_its_prompt_waited(pair: Pair) -> None:
    """A prompt for a session with original positions must not go on with one that has others."""
    engine = make(pair)
    ask(engine, [5, 6, 7], "talk")
    ask(engine, TURNS[-1], "long", max_tokens=10)
    request = engine.request([8], params(), "talk")
    engine.add(request)
    engine.sessions.delete("talk")
    engine.sessions.fork("long", "talk")
    while not engine.idle:
        engine.step()
    assert "session 'talk': has changed" in str(request.answers[0].error)


def test_more_answers_than_long_rows(pair: Pair) -> None:
    engine = make(pair, slots=8)
    assert [lane.executor.facts.slots for lane in engine.lanes] == [8, 2]
    with pytest.raises(UsageError, match="n=3: the engine has 2 batch slots for texts that may pass 64 tokens"):
        engine.request([*range(3, 90)], params(n=3))
    assert len(ask(engine, [*range(3, 90)], n=2).answers) == 2
    assert len(ask(engine, [3, 4, 5], n=3).answers) == 3


def test_a_step_that_fails_ends_the_answers_of_its_lane(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(pair)

    async def answered(prompt: list[int]) -> list[int]:
        return [event.token async for event in engine.stream(prompt, params()) if event.token is not None]

    async def both() -> list[Any]:
        return [*await asyncio.gather(answered([*range(3, 90)]), answered([5, 6]), return_exceptions=True)]

    def broken(_: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(engine.long_executor, "step", broken)
        long, short = asyncio.run(asyncio.wait_for(both(), 60))
    assert isinstance(long, RuntimeError)
    plain = msrnn.Engine(pair[0], slots=1)
    assert short == tokens(ask(plain, [5, 6]))
    longer = msrnn.Engine(pair[1], slots=1)
    assert asyncio.run(asyncio.wait_for(both(), 60))[0] == tokens(ask(longer, [*range(3, 90)]))
    engine.close()


def test_answers_go_on_while_a_long_prompt_is_read(pair: Pair) -> None:
    engine = make(pair, prompt_tokens=8)
    short = engine.request([5, 6], params(max_tokens=40))
    engine.add(short)
    while not short.answers[0].tokens:
        engine.step()
    long = engine.request([*range(3, 90)], params())
    engine.add(long)
    while not long.answers[0].tokens:
        engine.step()
    assert len(short.answers[0].tokens) >= 87 // 8
    while not engine.idle:
        engine.step()


def test_cancelled_requests_of_both_lanes_end(pair: Pair) -> None:
    engine = make(pair)
    requests = [engine.request(prompt, params(max_tokens=50)) for prompt in ([5, 6], [*range(3, 90)])]
    for request in requests:
        engine.add(request)
    engine.step()
    assert engine.counts.waiting + engine.counts.running == 2
    for request in requests:
        request.cancel()
    while not engine.idle:
        engine.step()
    assert [request.answers[0].finish_reason for request in requests] == ["cancelled", "cancelled"]


def test_a_long_answer_can_be_stopped(pair: Pair) -> None:
    """By its session, whichever lane it is in; its turn is kept."""
    engine = make(pair)
    request = engine.request([5, 6], params(max_tokens=90), "talk")
    engine.add(request)
    while len(request.answers[0].tokens) < 3:
        engine.step()
    assert engine.stop_session("talk")
    while not engine.idle:
        engine.step()
    assert len(tokens(request)) < 10
    assert (engine.sessions.turns("talk"), engine.sessions.infos()[0].positions) == (1, "compressed:lnln")


def test_bad_pairs(pair: Pair) -> None:
    other = msrnn.MultiStateRNN(build(llama(), "cpu"), "tova+1~36", 9, positions="compressed")
    with pytest.raises(UsageError, match="longer: belongs to another model"):
        LongEngine(pair[0], other, LENGTH, 1)
    with pytest.raises(UsageError, match="longer: has the positions of rnn, 'original'"):
        LongEngine(pair[0], pair[0], LENGTH, 1)


def test_rows_of_both_lanes_fit_the_memory(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one = pair[0].spec.nbytes(1)
    monkeypatch.setattr("msrnn.engine.decode_batch.available_bytes", lambda _: one * 5 * 5 // 4)
    assert fitting_slots(pair[0]) == 5
    assert fitting_slots(pair[0], others=1 / 4) == 4
    engine = LongEngine(*pair, LENGTH)
    assert [lane.executor.facts.slots for lane in engine.lanes] == [4, 1]


def test_a_session_that_has_passed_the_length_with_original_positions_stays_so(pair: Pair, tmp_path: Path) -> None:
    plain = msrnn.Engine(pair[0], 4, sessions=tmp_path)
    ask(plain, [*range(5, 75)], "talk")
    plain.sessions.fork("talk", "twin")
    expected = tokens(ask(plain, [7, 8], "twin"))
    engine = make(pair, sessions=tmp_path)
    assert tokens(ask(engine, [7, 8], "talk")) == expected
    assert (engine.long_requests, engine.sessions.info("talk").positions) == (0, "original")  # type: ignore[union-attr]


def test_long_answers_protect_their_prompt(pair: Pair) -> None:
    request = make(pair).request([5, 6, 7, 8], params(max_tokens=70), protect="prompt")
    engine = make(pair)
    engine.add(request)
    while not engine.idle:
        engine.step()
    assert engine.long_requests == 1
    prompt = torch.tensor([[5, 6, 7, 8]])
    how: dict[str, Any] = {"max_new_tokens": 70, "do_sample": False}
    assert tokens(request) == pair[1].generate(prompt, protect="prompt", **how)[0, 4:].tolist()
    assert tokens(request) != pair[1].generate(prompt, **how)[0, 4:].tolist()
    with pytest.raises(UsageError, match="9 tokens: 8 fit"):
        engine.request([*range(5, 14)], params(max_tokens=70), protect="prompt")


def test_the_longest_text_is_that_of_the_lane_that_would_answer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(pair)
    assert (engine.find_longest(50), engine.find_longest(5000)) == (50, 5000)
    for limit, expected in ((200, 200), (LENGTH, LENGTH), (10, LENGTH)):

        def check_length(tokens: int, limit: int = limit) -> None:
            if tokens > limit:
                raise UsageError("too long")

        monkeypatch.setattr(engine.long_executor, "check_length", check_length)
        assert engine.find_longest(5000) == expected
