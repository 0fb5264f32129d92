"""Commands in the processes that torchrun has started: all of them compute, the first one speaks and writes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARED_VERBS = ("serve", "generate", "read", "eval")
LATER = 5.0  # seconds; meanwhile the first process fails, too, and torchrun ends the others


def started_by_torchrun() -> bool:
    """Whether this is one of several processes of a job."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_first() -> bool:
    """Whether this process speaks and writes; a process alone does."""
    return not started_by_torchrun() or int(os.environ["RANK"]) == 0


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


def share_seed(model: PreTrainedModel) -> None:
    """Give all processes the first one's seed, so that they sample the same tokens."""
    import torch
    import torch.distributed as dist

    seed = torch.tensor([torch.initial_seed() % 2**63], device=model.device)
    dist.broadcast(seed, 0)
    torch.manual_seed(int(seed))
