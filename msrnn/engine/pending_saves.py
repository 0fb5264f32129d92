"""Answers that have ended, and whose sessions are not saved yet.

The last event of such an answer is held back until its session is saved: a client that has seen the end of an answer
finds the turn in the session, even if the process is killed then.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait

from msrnn.engine.requests import Event, Request, explain
from msrnn.engine.running_answer import RunningAnswer

WAIT_SECONDS = 0.005  # short, since new requests wait meanwhile


class PendingSaves:
    """Last events by the future of their write."""

    def __init__(self) -> None:
        self._held: dict[Future[None], tuple[RunningAnswer, Event]] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    @property
    def requests(self) -> dict[Request, None]:
        return {running.request: None for running, _ in self._held.values()}

    def hold(self, saved: Future[None], running: RunningAnswer, event: Event) -> None:
        self._held[saved] = running, event

    def collect(self, busy: bool) -> list[tuple[RunningAnswer, Event]]:
        """Answers whose sessions are saved, or could not be, with their last events; waits a little if not `busy`."""
        if not busy:
            wait(self._held, WAIT_SECONDS, FIRST_COMPLETED)
        found = []
        for saved in [future for future in self._held if future.done()]:
            (running, event), error = self._held.pop(saved), saved.exception()
            if error is not None:
                what, running.answer.error_code = explain(error)
                running.answer.error = f"the session is not saved, and stays as it was: {what}"
                event = event._replace(finish_reason="error")
            found.append((running, event))
        return found
