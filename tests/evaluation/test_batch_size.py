from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from msrnn.core.device_memory import if_it_fits
from msrnn.evaluation.batch_size import free_bytes, largest, query_free_memory

MEMINFO = Path("/proc/meminfo")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.core.device_memory.release", lambda: None)


def fits_up_to(limit: int, tried: list[int]) -> Callable[[int], bool]:
    def work(batch: int) -> bool:
        tried.append(batch)
        if batch > limit:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return True

    return lambda batch: if_it_fits(lambda: work(batch)) is not None


@pytest.mark.parametrize(
    ("limit", "estimate"), [(1, 1), (1, 40), (50, 30), (50, 50), (50, 55), (900, 890), (900, 2000)]
)
def test_the_largest_batch_is_found(limit: int, estimate: int) -> None:
    tried: list[int] = []
    found = largest(fits_up_to(limit, tried), estimate, 10_000, lambda batch: limit + 1 if batch < limit else batch)
    assert limit * 31 // 33 - 8 * (limit > 64) <= found <= limit
    assert len(tried) == len(set(tried)) <= 9


def test_more_is_tried_only_where_there_is_room() -> None:
    tried: list[int] = []
    assert largest(fits_up_to(1000, tried), 512, 10_000, lambda batch: batch + 4) == 512
    assert tried == [512]
    assert largest(fits_up_to(1000, tried), 512, 10_000, lambda batch: 960) == 960
    assert tried == [512, 512, 960]


def test_between_what_fits_and_what_fails() -> None:
    tried: list[int] = []
    assert largest(fits_up_to(500, tried), 512, 10_000, lambda _: 10_000) == 496
    assert tried == [512, 480, 496]


def test_the_cap_holds_and_nothing_may_fit() -> None:
    tried: list[int] = []
    assert largest(fits_up_to(1000, tried), 900, 8, lambda batch: batch * 2) == 8
    assert largest(fits_up_to(0, tried), 3, 8, lambda batch: batch * 2) == 0


@pytest.mark.skipif(not MEMINFO.exists(), reason="the system does not say what is free")
def test_what_is_free_is_what_the_system_says() -> None:
    told = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in MEMINFO.read_text().splitlines()}
    assert told["MemFree"] / 2 < query_free_memory(torch.device("cpu")) < told["MemTotal"]


def test_states_may_take_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr("msrnn.evaluation.batch_size.query_free_memory", lambda _: 1000)
    assert (free_bytes(cpu), free_bytes(torch.device("cuda"))) == (500, 970)
