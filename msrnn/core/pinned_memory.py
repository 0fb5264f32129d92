"""Pinned memory of the host for archives: what a GPU reads and writes by address.

Pinning is slow, a gigabyte takes half a second or more. So memory is pinned in slabs by several threads, the next slab
while the last is used, and what is not used any more is used again.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

from msrnn.core.device_memory import wait_for

PAGE = 4096
FIRST_SLAB, LARGEST_SLAB = 2**27, 2**30
MAPPED = 3  # cudaHostRegisterMapped and cudaHostRegisterPortable: every GPU finds it by the host's address
THREADS = 8  # that touch the pages of a slab, so that these exist when they are pinned


class PinnedMemory:
    """Blocks of pinned memory, for all archives of a process. A block returns when no tensor uses it any more.

    Slabs stay until the process ends: the address of one that is unmapped must not be pinned any more.
    """

    def __init__(self, pin: Callable[[int, torch.device], mmap.mmap], wait: Callable[[torch.device], None]) -> None:
        self._pin, self._wait = pin, wait
        self._devices: set[torch.device] = set()
        self._lock = threading.Lock()
        self._free: dict[int, list[tuple[mmap.mmap, int]]] = defaultdict(list)
        self._returned: deque[tuple[int, mmap.mmap, int]] = deque()  # kernels may still use these
        self._slab: mmap.mmap | None = None
        self._used = 0
        self._pool: ThreadPoolExecutor | None = None
        self._next: Future[mmap.mmap] | None = None

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """A tensor [nbytes] uint8 of arbitrary numbers, for a GPU."""
        nbytes = -(-nbytes // PAGE) * PAGE
        with self._lock:
            self._devices.add(device)
            if not self._free[nbytes] and self._returned:
                self._reclaim()
            slab, begin = self._free[nbytes].pop() if self._free[nbytes] else self._carve(nbytes, device)
        buffer = (ctypes.c_uint8 * nbytes).from_buffer(slab, begin)
        weakref.finalize(buffer, self._returned.append, (nbytes, slab, begin)).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def _reclaim(self) -> None:
        """Let returned blocks be used again, when no kernel reads or writes them."""
        count = len(self._returned)  # others may return while this waits
        for device in self._devices:
            self._wait(device)
        for _ in range(count):
            nbytes, slab, begin = self._returned.popleft()
            self._free[nbytes].append((slab, begin))

    def _carve(self, nbytes: int, device: torch.device) -> tuple[mmap.mmap, int]:
        if nbytes > FIRST_SLAB:
            return self._pin(nbytes, device), 0
        if self._slab is None or self._used + nbytes > len(self._slab):
            self._begin_slab(device)
        assert self._slab is not None
        begin, self._used = self._used, self._used + nbytes
        return self._slab, begin

    def _begin_slab(self, device: torch.device) -> None:
        """Take the slab that was pinned ahead, and pin another ahead."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "pins-memory")
        ahead, self._next = self._next, None
        slab = None
        if ahead is not None:
            with suppress(RuntimeError, OSError):  # there may be room for a smaller one
                slab = ahead.result()
        if slab is None:
            slab = self._pin(FIRST_SLAB, device)
        self._slab, self._used = slab, 0
        self._next = self._pool.submit(self._pin, min(LARGEST_SLAB, 2 * len(slab)), device)


def pin_slab(nbytes: int, device: torch.device) -> mmap.mmap:
    """New memory, pinned; by the context of a GPU that is in use, since another would take memory of its own."""
    slab = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            slab.madvise(getattr(mmap, advice))
    whole = torch.frombuffer(slab, dtype=torch.uint8)
    with ThreadPoolExecutor(THREADS) as pool:
        [*pool.map(Tensor.zero_, whole.split(-(-nbytes // THREADS)))]
    with torch.cuda.device(device):
        error = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), nbytes, MAPPED)
    if int(error):
        raise RuntimeError(f"{nbytes:,} bytes of the host's memory cannot be pinned ({error})")
    return slab


PINNED = PinnedMemory(pin_slab, wait_for)
