"""Whether other processes use the processors while something is timed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
MOST = 0.1  # share of all processors that others may use
SHORTEST = 0.1  # seconds; the system counts in hundredths


class Clocks(NamedTuple):
    """Seconds: of the wall clock, on all processors by all processes, and by this process."""

    wall: float
    everyone: float
    own: float


def read_clocks() -> Clocks | None:
    """None where the system does not count, as on macOS."""
    try:
        line = STAT.read_text().partition("\n")[0].split()
        user, nice, system, _idle, _waiting, irq, softirq, steal = map(int, line[1:9])
    except (OSError, ValueError):
        return None
    ticks = user + nice + system + irq + softirq + steal  # of the last, another virtual machine had the processor
    return Clocks(time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time())


class OtherProcesses:
    """The CPU time of other processes from now on."""

    def __init__(self) -> None:
        self._began = read_clocks()

    def processors(self) -> float | None:
        """How many processors others used on average. None if that is not known, or the time was too short."""
        ended = read_clocks()
        if self._began is None or ended is None or ended.wall - self._began.wall < SHORTEST:
            return None
        wall, everyone, own = (end - begin for end, begin in zip(ended, self._began, strict=True))
        return max(0.0, everyone - own) / wall

    def disturb(self, threads: int) -> bool:
        """Whether others left too few processors to this process, which uses this many threads."""
        count, others = os.cpu_count() or 1, self.processors()
        return others is not None and others > MOST * count and others + threads > count
