from __future__ import annotations

from concurrent.futures import Future

from msrnn.engine.pending_saves import PendingSaves
from msrnn.engine.requests import Event, Request, SamplingParams
from msrnn.engine.running_answer import RunningAnswer


def hold(pending: PendingSaves) -> tuple[RunningAnswer, Future[None]]:
    running = RunningAnswer(Request([5], SamplingParams()), 0, [5], 0, None, frozenset(), object())
    saved: Future[None] = Future()
    pending.hold(saved, running, Event(running.request, 0, 7, "", None, "length"))
    return running, saved


def test_an_event_is_held_until_its_session_is_saved() -> None:
    pending = PendingSaves()
    assert not pending
    first, _ = hold(pending)
    second, saved = hold(pending)
    assert [*pending.requests] == [first.request, second.request]
    assert pending.collect(busy=True) == []
    assert pending.collect(busy=False) == []  # it waits a little, and not for long
    saved.set_result(None)
    ((running, event),) = pending.collect(busy=False)
    assert running is second
    assert (event.token, event.finish_reason) == (7, "length")
    assert [*pending.requests] == [first.request]
    assert pending


def test_a_session_that_cannot_be_saved_is_an_error_of_its_answer() -> None:
    pending = PendingSaves()
    running, saved = hold(pending)
    saved.set_exception(OSError(28, "No space left on device"))
    ((_, event),) = pending.collect(busy=True)
    assert event.finish_reason == "error"
    assert running.answer.error == "the session is not saved, and stays as it was: No space left on device"
    assert not pending
