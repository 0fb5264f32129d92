"""The running batch, with an executor that has no model."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from msrnn.engine.batch import Batch
from msrnn.engine.executor import SamplerSpec
from msrnn.engine.requests import Event, Request, SamplingParams
from msrnn.engine.running_answer import RunningAnswer
from tests.helpers.fake_executor import FakeExecutor, answer_to


class Kept:
    """What was kept of answers that have ended: the tokens that their slots have read."""

    def __init__(self, executor: FakeExecutor) -> None:
        self.executor, self.read = executor, list[list[int]]()
        self.saved: Future[None] | None = None

    def __call__(self, running: RunningAnswer, slot: int) -> Future[None] | None:
        self.read.append(self.executor.take(slot, len(running.read)).tokens)
        return self.saved


@pytest.fixture
def executor() -> FakeExecutor:
    return FakeExecutor(slots=4)


@pytest.fixture
def kept(executor: FakeExecutor) -> Kept:
    return Kept(executor)


@pytest.fixture
def batch(executor: FakeExecutor, kept: Kept) -> Batch:
    return Batch(executor, kept)


def join(batch: Batch, executor: FakeExecutor, prompt: list[int], retention: int = 0, **params: Any) -> Request:
    request = Request(prompt, SamplingParams(**params), retention=retention)
    state = executor.new_state()
    executor.read(state, prompt)
    sampler = executor.new_sampler(state, SamplerSpec(request.params, 0, prompt))
    numbers = range(request.params.n)
    batch.join([RunningAnswer(request, i, prompt, 0, None, frozenset(), sampler) for i in numbers], state)
    return request


def run(batch: Batch) -> list[Event]:
    events = batch.results()
    while batch.running:
        batch.step()
        events += batch.results()
    return events


def test_slots_of_answers_that_end_are_filled_by_the_last_ones(
    batch: Batch, executor: FakeExecutor, kept: Kept
) -> None:
    prompts, lengths = [[5, 6], [7], [8, 9, 10]], [2, 7, 4]
    requests = [join(batch, executor, p, max_tokens=n) for p, n in zip(prompts, lengths, strict=True)]
    events = run(batch)
    assert [request.answers[0].tokens for request in requests] == [*map(answer_to, prompts, lengths)]
    assert [events[0].token for events in ([e for e in events if e.request is r] for r in requests)] == [
        answer_to(prompt, 1)[0] for prompt in prompts
    ]
    # The last token of an answer is not read.
    assert kept.read == [
        [*prompts[i], *answer_to(prompts[i], lengths[i] - 1)] for i in sorted(range(3), key=lengths.__getitem__)
    ]


def test_an_overlapping_batch_has_read_the_last_token_as_well(kept: Kept) -> None:
    kept.executor = executor = FakeExecutor(slots=2, overlaps=True)
    batch = Batch(executor, kept)
    request = join(batch, executor, [5, 6], max_tokens=3)
    assert batch.results() == []  # the first token is looked at while the second is computed
    run(batch)
    assert request.answers[0].tokens == answer_to([5, 6], 3)
    assert kept.read == [[5, 6, *answer_to([5, 6], 3)]]


def test_a_step_without_answers_computes_nothing(batch: Batch, executor: FakeExecutor) -> None:
    batch.step()
    assert (batch.results(), executor.calls) == ([], [])


def test_answers_to_one_prompt_share_its_prefill(batch: Batch, executor: FakeExecutor) -> None:
    request = join(batch, executor, [5, 6], n=3, max_tokens=2)
    run(batch)
    assert [answer.tokens for answer in request.answers] == [answer_to([5, 6], 2)] * 3
    assert executor.calls == [("read", 2), ("put", 3), ("step", 3)]


def test_an_answer_that_fails_leaves_the_others(batch: Batch, executor: FakeExecutor, kept: Kept) -> None:
    executor.broken = {5}
    bad, good = join(batch, executor, [5]), join(batch, executor, [6], max_tokens=3)
    run(batch)
    assert bad.answers[0].finish_reason == "error"
    assert good.answers[0].tokens == answer_to([6], 3)
    assert len(kept.read) == 1  # of an answer with an error, nothing is kept


def test_stopped_answers_are_kept_and_cancelled_ones_are_not(batch: Batch, executor: FakeExecutor, kept: Kept) -> None:
    requests = [join(batch, executor, [number]) for number in (5, 6, 7)]
    batch.results()
    batch.step()
    batch.results()
    requests[0].stop()
    requests[1].cancel()
    events = batch.drop_cancelled()
    assert {(event.request.prompt[0], event.finish_reason) for event in events} == {(5, "stop"), (6, "cancelled")}
    assert kept.read == [[5, *answer_to([5], 1)]]
    assert [running.request for running in batch.running] == [requests[2]]
    batch.step()
    batch.results()
    assert requests[2].answers[0].tokens == answer_to([7], 3)


def test_an_event_waits_until_its_session_is_saved(batch: Batch, executor: FakeExecutor, kept: Kept) -> None:
    kept.saved = Future()
    request = join(batch, executor, [5], max_tokens=1)
    assert batch.results() == []
    assert (batch.running, request.finished) == ([], False)
    assert batch.collect_saved(busy=True) == []
    kept.saved.set_result(None)
    (event,) = batch.collect_saved(busy=False)
    assert (event.token, event.finish_reason, request.finished) == (answer_to([5], 1)[0], "length", True)


def test_events_have_the_retention_that_was_asked_for(batch: Batch, executor: FakeExecutor) -> None:
    join(batch, executor, [5, 6], retention=2, max_tokens=4)
    found = [event.retention and event.retention.seen for event in run(batch)]
    assert found == [2, None, 4, 5]


def test_an_interrupted_step_forgets_all_answers(batch: Batch, executor: FakeExecutor) -> None:
    join(batch, executor, [5])
    batch.clear()
    assert (batch.running, batch.results()) == ([], [])
