from __future__ import annotations

from pathlib import Path

import pytest

from msrnn.evaluation.benchmark import other_processes
from msrnn.evaluation.benchmark.other_processes import Clocks, OtherProcesses, read_clocks


def watched(monkeypatch: pytest.MonkeyPatch, *clocks: Clocks | None) -> OtherProcesses:
    """A watch that reads these clocks, on a machine with two processors."""
    left = [*clocks]
    monkeypatch.setattr(other_processes, "read_clocks", lambda: left.pop(0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    return OtherProcesses()


BEGAN = Clocks(50.0, 700.0, 30.0)


@pytest.mark.parametrize(
    ("ended", "threads", "disturbed"),
    [
        (Clocks(60.0, 720.0, 50.0), 2, False),  # all of it is ours
        (Clocks(60.0, 720.0, 40.0), 2, True),  # half of it
        (Clocks(60.0, 710.0, 31.0), 2, True),  # we have no work for the rest
        (Clocks(60.0, 715.0, 39.0), 1, False),  # six tenths of a processor, and there is one left
        (Clocks(60.0, 721.0, 49.5), 2, False),  # little
        (Clocks(60.0, 719.0, 50.0), 2, False),  # counted in hundredths, less than ours
        (Clocks(50.05, 700.1, 30.0), 2, False),  # too short to tell
        (None, 2, False),
    ],
)
def test_others_disturb_if_they_leave_too_few_processors(
    ended: Clocks | None, threads: int, disturbed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert watched(monkeypatch, BEGAN, ended).disturb(threads) == disturbed


def test_processors_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched(monkeypatch, BEGAN, Clocks(60.0, 720.0, 35.0)).processors() == 1.5
    assert watched(monkeypatch, None, BEGAN).processors() is None


def test_clocks_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_processes, "STAT", tmp_path / "stat")
    assert read_clocks() is None
    (tmp_path / "stat").write_text("cpu  100 20 3 9999 777 4 5 600 50 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n")
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_CLK_TCK": 100}[name])
    found = read_clocks()
    assert found is not None
    assert found.everyone == pytest.approx(7.32)
