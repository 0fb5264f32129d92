"""The batch that fits into memory: how much is free, a lack of memory, and the search for the largest batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from msrnn.core.device_memory import available_bytes, is_out_of_memory
from msrnn.errors import DoesNotFitError, UsageError

SHARE = {"cuda": 0.97, "cpu": 0.5}  # of the free memory; the rest is for activations and for other processes


def query_free_memory(device: torch.device) -> int:
    """Free memory of a device; 0 where the system does not say."""
    return available_bytes(device) or 0


def free_bytes(device: torch.device) -> int:
    """The part of the free memory that states may take."""
    return int(SHARE["cuda" if device.type == "cuda" else "cpu"] * query_free_memory(device))


@contextmanager
def batch_that_fits(batch: int, what: str) -> Iterator[None]:
    """Turn an out-of-memory error of `what` into bad input that names the batch."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) or isinstance(error, DoesNotFitError):  # which says what fits
            raise
        smaller = "a smaller batch" if batch > 1 else "a smaller size or model"
        raise UsageError(
            f"{what} does not fit into memory",
            name="batch",
            value=batch,
            advice=f"results so far are kept, run again with {smaller}",
        ) from error


def largest(fits: Callable[[int], bool], estimate: int, cap: int, more: Callable[[int], int]) -> int:
    """The largest batch that fits, accurate to 1/32; 0 if none does.

    The estimate is lowered in growing steps until one fits. Then it is raised to what `more` estimates from a batch
    that fits, but at most half-way to the smallest batch that failed.
    """
    batch, failed, cut = max(1, min(round_batch(estimate), cap)), cap + 1, 16
    while not fits(batch):
        if batch == 1:
            return 0
        failed, batch, cut = batch, max(1, round_batch(batch - max(1, batch // cut))), max(2, cut // 2)
    while True:
        higher = min(more(batch), cap if failed > cap else (batch + failed) // 2)
        if round_batch(higher) <= batch + batch // 32:
            return batch
        if fits(round_batch(higher)):
            batch = round_batch(higher)
        else:
            failed = round_batch(higher)


def round_batch(batch: int) -> int:
    """Round a large batch down to a multiple of 8 or 4, for which matrix products are faster."""
    unit = 8 if batch >= 128 else 4 if batch >= 64 else 1
    return batch // unit * unit
