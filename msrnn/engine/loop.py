"""A thread that runs an engine, and hands its events to the asyncio loops of those who wait for them."""

from __future__ import annotations

import asyncio
import threading
from typing import Protocol

from msrnn.engine.requests import Event, Request
from msrnn.errors import UsageError

Events = asyncio.Queue[Event | Exception]


class Steps(Protocol):
    """What the thread needs of an engine."""

    @property
    def idle(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def step(self) -> list[Event]: ...


class Loop:
    """Steps while there is work, and sleeps while there is none."""

    def __init__(self, engine: Steps) -> None:
        self._engine = engine
        self._queues: dict[Request, tuple[asyncio.AbstractEventLoop, Events]] = {}
        self._arrived: list[Request] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="msrnn engine", daemon=True)
        self._thread.start()

    def add(self, request: Request) -> Events:
        """Queue a request from inside an asyncio loop; an exception in the queue is the end of the request."""
        queue: Events = asyncio.Queue()
        with self._changed:
            if self._closed:
                raise UsageError("this engine is closed: make a new one")
            self._queues[request] = asyncio.get_running_loop(), queue
            self._arrived.append(request)
            self._changed.notify()
        return queue

    def close(self) -> None:
        """Cancel what is under way, and wait for the thread to end."""
        with self._changed:
            self._closed = True
            for request in self._queues:
                request.cancel()
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while self._take_arrived():
            try:
                events = self._engine.step()
            except Exception as error:  # what was under way has failed; the engine goes on with what waits
                for request in [request for request in self._queues if request.finished]:
                    self._hand_over(request, error)
                continue
            for event in events:
                self._hand_over(event.request, event)

    def _take_arrived(self) -> bool:
        """Wait for work, and give the engine what has arrived; False when there is none and the loop is closed."""
        with self._changed:
            while not self._arrived and self._engine.idle and not self._closed:
                self._changed.wait()
            for request in self._arrived:
                self._engine.add(request)
            self._arrived.clear()
            return not self._engine.idle

    def _hand_over(self, request: Request, event: Event | Exception) -> None:
        with self._changed:
            found = self._queues.pop(request, None) if request.finished else self._queues.get(request)
        if found is None:
            return
        loop, queue = found
        try:
            loop.call_soon_threadsafe(queue.put_nowait, event)
        except RuntimeError:  # that asyncio loop has ended
            request.cancel()
