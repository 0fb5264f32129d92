"""Run pytest with these words in a session of its own, and kill what is left of the session at the end.

A test that takes too long is ended with its process alone. Ray, its workers and servers would go on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path


def main(words: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    tests = subprocess.Popen([sys.executable, "-m", "pytest", *words], start_new_session=True)
    try:
        return tests.wait()
    finally:
        for number in processes_of(tests.pid):
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


def processes_of(session: int) -> list[int]:
    """Their numbers. Those that end meanwhile are left out."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # After the name, which may contain anything: state, parent, process group, session.
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == session:
                found.append(int(folder.name))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
