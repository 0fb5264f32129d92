"""Work on a GPU that runs beside what is launched after it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_OWN = threading.local()  # of each thread: a stream that one thread captures must not be used by another
MOST = 4  # of a thread: torch has 32 for all


class SideStreams:
    """Streams of a device that start after what was launched before, and that are joined before what comes next.

    Tensors that are used there must live until `join`. A CPU has no streams: all is done in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun = 0

    @contextmanager
    def beside(self) -> Iterator[None]:
        """The next stream, for what is launched inside."""
        if self._device.type != "cuda":
            yield
            return
        stream = _get_stream(self._device, self._begun % MOST)
        self._begun += 1
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """Let what is launched next wait for all of them."""
        for number in range(min(self._begun, MOST)):
            torch.cuda.current_stream(self._device).wait_stream(_get_stream(self._device, number))
        self._begun = 0


def _get_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    streams: dict[torch.device, list[torch.cuda.Stream]] = _OWN.__dict__.setdefault("streams", {})
    of_device = streams.setdefault(device, [])
    while len(of_device) <= number:
        of_device.append(torch.cuda.Stream(device))
    return of_device[number]
