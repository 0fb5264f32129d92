"""Whether two answers in LaTeX mean the same, by math-verify, in a process of its own.

Answers of a model can keep a computer algebra system busy for ever. Signals, which math-verify uses to stop it, work in
the main thread alone. A process can always be stopped, and its memory has a limit.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from types import TracebackType
from typing import Any

from msrnn.errors import UsageError

SECONDS = 10.0  # for one comparison
START_SECONDS = 120.0  # until the process has imported its packages
ORPHAN_SECONDS = 120  # for one comparison of a process that nobody stops, since this one was killed
MEMORY = 4 * 2**30  # bytes of the process
LONGEST = 2000  # characters of an answer; a longer one is no final answer
PACKAGES = ("math_verify", "latex2sympy2_extended", "antlr4")


def check_verifier() -> None:
    """Refuse to compare where math-verify is not installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"answers in LaTeX are compared by the package math-verify, which is not installed ({missing[0]}): "
            "pip install 'msrnn[reasoning]'"
        )


class MathVerifier:
    """Compares answers, one after the other. Its process starts when it is needed, and again after it was stopped."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> MathVerifier:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def is_same(self, answer: str, expected: str) -> bool:
        """Whether an answer means what is expected. One that takes too long to compare does not."""
        if "".join(answer.split()) == "".join(expected.split()):
            return True
        if len(answer) > LONGEST:
            return False
        process = self._process or self._start()
        line = json.dumps([expected, answer]).encode() + b"\n"
        with suppress(BrokenPipeError):
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        reply = _read_line(process, self.seconds)
        if not reply:
            self.close()
        return reply == b"true\n"

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        check_verifier()
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
        )
        if not _read_line(self._process, START_SECONDS):
            self.close()
            raise UsageError(f"math-verify does not start: python -m {__name__} shows why")
        return self._process


def _read_line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """A line of the process; empty if it ends or takes too long. A line is written at once, so it comes whole."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    return os.read(process.stdout.fileno(), 100) if ready else b""


def compare_latex(expected: str, answer: str) -> bool:
    """Compare without a time limit. Only LaTeX is parsed, by a grammar: plain expressions would be evaluated."""
    from math_verify import LatexExtractionConfig, parse, verify

    how: Any = {"extraction_config": [LatexExtractionConfig(boxed_match_priority=0)], "parsing_timeout": None}
    both = [parse(rf"\boxed{{{text}}}", **how) for text in (expected, answer)]
    return all(both) and bool(verify(*both, timeout_seconds=None))


def main() -> None:
    """Read pairs as lines of JSON, and write whether they mean the same."""
    import resource

    compare_latex("1", "2")
    logging.disable()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard), hard))
    replies, sys.stdout = sys.stdout.fileno(), sys.stderr  # what other packages print is no reply
    os.write(replies, b"ready\n")
    for line in sys.stdin:
        signal.alarm(ORPHAN_SECONDS)
        try:
            same = compare_latex(*json.loads(line))
        except Exception:  # of any kind, from a grammar and an algebra system that get arbitrary text
            same = False
        signal.alarm(0)
        os.write(replies, b"true\n" if same else b"false\n")


if __name__ == "__main__":
    main()
