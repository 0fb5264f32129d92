from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from msrnn.evaluation.benchmark.other_processes import OtherProcesses
from msrnn.evaluation.benchmark.timing import (
    Floor,
    bandwidth,
    milliseconds,
    milliseconds_in_turns,
    products,
    weight_bytes,
)
from tests.helpers.tiny import build, llama

CPU = torch.device("cpu")


def test_floor_reads_states_and_the_slower_of_weights_and_products() -> None:
    floor = Floor(bandwidth=1000.0, weights=5000)
    assert floor.milliseconds(state_bytes=2000, products=1.0) == 2 + 5
    assert floor.milliseconds(state_bytes=2000, products=9.0) == 2 + 9


def test_median_without_the_warm_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 100.0, 1.9, 2.0, 2.1])
    monkeypatch.setattr("msrnn.evaluation.benchmark.timing._once", lambda *_: next(times))
    assert milliseconds(lambda: None, CPU, repeats=3, warm_ups=2) == (2.0, 1.9, 2.1, True)


def taking(monkeypatch: pytest.MonkeyPatch, *times: float) -> list[float]:
    """Runs that take these times; what is left of them."""
    left = list(times)
    monkeypatch.setattr("msrnn.evaluation.benchmark.timing._once", lambda *_: left.pop(0))
    return left


def test_slow_work_is_repeated_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    left = taking(monkeypatch, *[7.0] * 50)
    milliseconds(lambda: None, CPU, repeats=50, warm_ups=1, least=4, patience=0)
    assert len(left) == 45


def test_runs_that_disagree_are_repeated_until_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, idle, rest = (9.0, 2.0, 30.0, 4.0), (2.0, 2.1, 2.0, 1.9), (5.0,) * 4
    left = taking(monkeypatch, *busy, *idle, *rest)
    assert milliseconds(lambda: None, CPU, repeats=4, warm_ups=0) == (2.0, 1.9, 30.0, True)
    assert len(left) == 4


def test_runs_that_never_agree_are_unsteady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rounds; the median is that of the steadiest."""
    rounds = (9.0, 2.0, 30.0, 4.0), (2.0, 3.0, 2.0, 3.0), (50.0, 1.0, 1.0, 80.0)
    left = taking(monkeypatch, *rounds[0], *rounds[1], *rounds[2])
    assert milliseconds(lambda: None, CPU, repeats=4, warm_ups=0) == (2.5, 1.0, 80.0, False)
    assert left == []


def test_works_are_run_in_turns_and_have_the_times_of_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first round B is unsteady, and A runs in a slow minute: its times there do not count either."""
    order = ""

    def work(name: str) -> Callable[[], None]:
        def run() -> None:
            nonlocal order
            order += name

        return run

    times = iter([0.0, 0.0, 9.0, 2.0, 9.0, 30.0, 9.0, 80.0, 4.0, 2.0, 4.0, 2.0, 4.0, 2.0])
    monkeypatch.setattr("msrnn.evaluation.benchmark.timing._once", lambda run, _: (run(), next(times))[1])
    found = milliseconds_in_turns([work("A"), work("B")], CPU, repeats=3, warm_ups=1)
    assert found == [(4.0, 4.0, 9.0, True), (2.0, 2.0, 80.0, True)]
    assert order == "AB" + "ABABAB" * 2


def test_runs_beside_other_processes_are_repeated_and_never_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though they agree: they are as slow as what others leave to them."""
    disturbed = [True, True, False, True, True, True]
    monkeypatch.setattr(OtherProcesses, "disturb", lambda *_: disturbed.pop(0))
    left = taking(monkeypatch, 35.0, 35.0, 26.0, 26.0, 17.0, 17.0, *[20.0] * 6)
    assert milliseconds(lambda: None, CPU, repeats=2, warm_ups=0) == (17.0, 17.0, 35.0, True)
    assert len(left) == 6
    assert milliseconds(lambda: None, CPU, repeats=2, warm_ups=0) == (20.0, 20.0, 20.0, False)
    assert left == disturbed == []


def test_the_floor_of_products_is_the_fastest_run(monkeypatch: pytest.MonkeyPatch) -> None:
    taking(monkeypatch, *[9.0] * 3, *([9.0] * 6 + [3.0] * 14) * 3)
    assert products(build(llama()), 3) == 3.0


def test_weights_that_a_step_reads() -> None:
    untied, tied = (build(llama(tie_word_embeddings=tied)) for tied in (False, True))
    table = untied.get_input_embeddings().weight.nbytes
    assert weight_bytes(untied) == sum(p.nbytes for p in untied.parameters()) - table
    assert weight_bytes(tied) == sum(p.nbytes for p in tied.parameters()) == weight_bytes(untied)


def test_measured_parts_are_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.evaluation.benchmark.timing.BUFFER_BYTES", {"cpu": 2**20})
    assert bandwidth(CPU) > 0
    assert products(build(llama()), 3) > 0
