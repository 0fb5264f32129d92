"""Commands in the processes that torchrun has started: all of them compute, the first one prints and writes files."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from msrnn.core.torchrun import is_first

SHARED_VERBS = ("serve", "generate", "read", "eval")
LATER = 5.0  # seconds; meanwhile the first process fails, too, and torchrun ends the others


@contextmanager
def speaking_once() -> Iterator[None]:
    """Only the first process prints. What is wrong in another one alone is printed, too."""
    if is_first():
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def print_error(message: str) -> None:
    if not is_first():
        time.sleep(LATER)
    print("msrnn:", " ".join(message.split()), file=sys.stderr)
