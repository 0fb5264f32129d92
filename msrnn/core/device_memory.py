"""The memory of a device: what is free, whether an allocation fits, out-of-memory errors, copies that do not wait."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from msrnn.errors import DoesNotFitError

T = TypeVar("T")
CAPTURING = threading.RLock()  # held while a CUDA graph is captured, which a wait for its device would break
_CGROUP = Path("/sys/fs/cgroup")
_SIGNS = (
    "out of memory",
    "alloc_failed",
    "can't allocate memory",
    "cannot allocate memory",
    "storage size calculation overflowed",
)


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done what it was told to, and until no graph is being captured."""
    with CAPTURING:
        torch.cuda.synchronize(device)


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device; None where the system does not say.

    On a GPU, what torch has reserved and does not use counts as free. On a CPU, the limits of the process and of its
    control group count as well as the machine's memory.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    if device.type != "cpu":
        return None
    limits = [limit for limit in (_machine(), _control_group(), _address_space()) if limit is not None]
    return max(0, min(limits)) if limits else None


def _machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        if "SC_AVPHYS_PAGES" not in os.sysconf_names:
            return None
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _control_group() -> int | None:
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return int(limit) - int(used)
    except (OSError, ValueError):  # no such group, or "max"
        return None


def _address_space() -> int | None:
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return None
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return limit - pages * os.sysconf("SC_PAGE_SIZE")
    except (ImportError, OSError, ValueError):
        return None


def check_fits(needed: int, device: torch.device, what: str, advice: Callable[[int], str]) -> None:
    """Raise if `what` needs more bytes than a device has free; `advice(free)` ends the message with what would fit."""
    free = available_bytes(device)
    if free is not None and needed > free:
        message = f"{what} takes {gigabytes(needed)}, and {gigabytes(free)} is free on {device}"
        raise DoesNotFitError(f"{message}: {advice(free)}")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error or one of its causes is about memory: a failed CUDA graph capture reports another first.

    The one place that knows how torch, CUDA and the system word it, where they have no type for it.
    """
    if error is None:
        return False
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or any(sign in str(error).lower() for sign in _SIGNS) or is_out_of_memory(error.__context__)


def release() -> None:
    """Return unused memory to the device."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def if_it_fits(work: Callable[[], T]) -> T | None:
    """The result of the work; None where it ran out of memory. Its memory is free afterwards."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    finally:
        release()
    return None


def gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"


def on_device(values: Sequence[float], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers as a tensor; from pinned memory, since a copy from any other waits for all work of a GPU."""
    return send(torch.tensor(values, dtype=dtype), device)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; from the host by pinned memory, as `on_device`."""
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)  # the caller may write to its own pinned memory at once
