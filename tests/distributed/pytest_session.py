"""Run pytest with these words in a session of its own, and kill what is left of the session at the end.

A test that takes too long is ended with its process alone. Ray, its workers and servers would go on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress


def main(words: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    tests = subprocess.Popen([sys.executable, "-m", "pytest", *words], start_new_session=True)
    try:
        return tests.wait()
    finally:
        left = subprocess.run(["pgrep", "-s", str(tests.pid)], capture_output=True, text=True, check=False)
        for number in left.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
