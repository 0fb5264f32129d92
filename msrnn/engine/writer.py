"""A thread that writes files, so that the engine's own thread does not wait for the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Writer:
    """Writes in the order in which it is asked, one file at a time. The first call starts its thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, write: Callable[[], None]) -> Future[None]:
        with self._lock:
            self._pool = self._pool or ThreadPoolExecutor(1, "msrnn writer")
            return self._pool.submit(write)

    def close(self) -> None:
        """Wait for everything that was asked for, and end the thread."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()


def make_done_future(error: Exception | None = None) -> Future[None]:
    """The future of a write that is done already, or that failed before it began."""
    future: Future[None] = Future()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
    return future
