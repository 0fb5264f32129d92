"""Answers that have ended, while their sessions are being written: their last events are held back until then."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait

from msrnn.engine.requests import Event, Request, explain
from msrnn.engine.running import Running

WAIT_SECONDS = 0.005  # short, since new requests wait as well


class Saving:
    """So whoever has seen the end of an answer finds its turn in the session, even if the process is killed then."""

    def __init__(self) -> None:
        self._held: dict[Future[None], tuple[Running, Event]] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    @property
    def requests(self) -> dict[Request, None]:
        return {running.request: None for running, _ in self._held.values()}

    def hold(self, saved: Future[None], running: Running, event: Event) -> None:
        self._held[saved] = running, event

    def done(self, busy: bool) -> list[tuple[Running, Event]]:
        """Answers whose sessions are saved, or cannot be, which is their error alone; waits a little if not `busy`."""
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
