"""The processes of a job that torchrun has started."""

from __future__ import annotations

import os


def is_torchrun() -> bool:
    """Whether this is one of several processes of a job."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_first() -> bool:
    """Whether this process prints and writes: rank 0 of a job, or a process alone."""
    return not is_torchrun() or int(os.environ["RANK"]) == 0
