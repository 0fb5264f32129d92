"""A thread that runs the scheduler of an engine, and sends its events to the asyncio loops of its clients."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Protocol

from msrnn.engine.requests import Event, Request, explain
from msrnn.errors import UsageError

FAILED_STEPS = 3
Events = asyncio.Queue[Event | Exception]


@dataclass
class _Consumer:
    """The client of a request."""

    loop: asyncio.AbstractEventLoop
    events: Events
    unfinished: int  # answers whose last event was not sent


class Steps(Protocol):
    """The part of an engine that the thread calls."""

    @property
    def idle(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def step(self) -> list[Event]: ...


class Loop:
    """Steps while there is work, and sleeps while there is none."""

    def __init__(self, engine: Steps) -> None:
        self._engine = engine
        self._consumers: dict[Request, _Consumer] = {}
        self._arrived: list[Request] = []
        self._changed = threading.Condition()
        self._closed = False
        self._failed = 0  # steps since the last finished answer
        self._thread = threading.Thread(target=self._run, name="msrnn engine", daemon=True)
        self._thread.start()

    def add(self, request: Request) -> Events:
        """Queue a request from inside an asyncio loop; an exception in the queue is the end of the request."""
        consumer = _Consumer(asyncio.get_running_loop(), asyncio.Queue(), request.params.n)
        with self._changed:
            if self._closed:
                raise UsageError("this engine is closed: make a new one")
            self._consumers[request] = consumer
            self._arrived.append(request)
            self._changed.notify()
        return consumer.events

    @property
    def healthy(self) -> bool:
        """False after several steps have failed since the last answer: the device then has to be started again."""
        return self._failed < FAILED_STEPS and (self._closed or self._thread.is_alive())

    def close(self) -> None:
        """Cancel all requests, and wait for the thread to end."""
        with self._changed:
            self._closed = True
            for request in self._consumers:
                request.cancel()
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while self._take_arrived():
            try:
                events = self._engine.step()
                if any(event.finish_reason in ("stop", "length") for event in events):
                    self._failed = 0
            except Exception as error:  # requests under way have failed; the engine continues with waiting ones
                self._failed += 1
                with self._changed:
                    ended = [request for request in self._consumers if request.finished]
                self._hand_over([(request, error) for request in ended])
                continue
            self._hand_over([(event.request, event) for event in events])

    def _take_arrived(self) -> bool:
        """Wait for requests, and add those that have arrived; False if there is no work and the loop is closed."""
        with self._changed:
            while True:
                for request in self._arrived:
                    self._add(request)
                self._arrived.clear()
                if self._closed or not self._engine.idle:
                    return not self._engine.idle
                self._changed.wait()

    def _add(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except Exception as error:  # of this request alone
            request.fail(*explain(error))
            self._hand_over([(request, error)])

    @property
    def arrived(self) -> list[Request]:
        """Requests that the engine does not have yet."""
        return [*self._arrived]

    def _hand_over(self, events: list[tuple[Request, Event | Exception]]) -> None:
        """Wake each asyncio loop once for all events of a step: with many streams, each call would delay the device."""
        handed: dict[asyncio.AbstractEventLoop, list[tuple[Request, Events, Event | Exception]]] = {}
        for request, event in events:
            consumer = self._consumers[request]
            if isinstance(event, Exception):
                consumer.unfinished = 0
            elif event.finish_reason is not None:
                consumer.unfinished -= 1
            if consumer.unfinished == 0:
                with self._changed:
                    del self._consumers[request]
            handed.setdefault(consumer.loop, []).append((request, consumer.events, event))
        for loop, together in handed.items():
            try:
                loop.call_soon_threadsafe(_put, together)
            except RuntimeError:  # that asyncio loop has ended
                for request, _, _ in together:
                    request.cancel()


def _put(together: list[tuple[Request, Events, Event | Exception]]) -> None:
    for _, events, event in together:
        events.put_nowait(event)
