from __future__ import annotations

import pytest
import torch
from tiny import build, llama

from msrnn.evaluate.efficiency.timing import Floor, bandwidth, milliseconds, products, weight_bytes

CPU = torch.device("cpu")


def test_floor_reads_states_and_the_slower_of_weights_and_products() -> None:
    floor = Floor(bandwidth=1000.0, weights=5000)
    assert floor.milliseconds(state_bytes=2000, products=1.0) == 2 + 5
    assert floor.milliseconds(state_bytes=2000, products=9.0) == 2 + 9


def test_median_without_the_warm_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 100.0, 1.0, 2.0, 9.0])
    monkeypatch.setattr("msrnn.evaluate.efficiency.timing._once", lambda *_: next(times))
    assert milliseconds(lambda: None, CPU, repeats=3, warm_ups=2) == 2


def test_slow_work_is_repeated_less_often() -> None:
    calls: list[int] = []
    milliseconds(lambda: calls.append(0), CPU, repeats=50, warm_ups=1, least=4, patience=0)
    assert len(calls) == 5


def test_weights_that_a_step_reads() -> None:
    untied, tied = (build(llama(tie_word_embeddings=tied)) for tied in (False, True))
    table = untied.get_input_embeddings().weight.nbytes
    assert weight_bytes(untied) == sum(p.nbytes for p in untied.parameters()) - table
    assert weight_bytes(tied) == sum(p.nbytes for p in tied.parameters()) == weight_bytes(untied)


def test_measured_parts_are_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.evaluate.efficiency.timing.BUFFER_BYTES", {"cpu": 2**20})
    assert bandwidth(CPU) > 0
    assert products(build(llama()), 3) > 0
