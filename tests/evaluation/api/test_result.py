from __future__ import annotations

from pathlib import Path

import pytest

from msrnn.evaluation.api.result import EvaluationResult
from msrnn.evaluation.report import Table

MAIN = Table("losses", "the losses", "", ["policy", "8", "1,024"], [["tova", "9.5", "10.25"], ["full", None, "3"]])


def make(**more: object) -> EvaluationResult[None]:
    other = Table("", "more", "", ["a"], [["b"]])
    return EvaluationResult(None, [MAIN, other], [], {}, "# a page\n", **more)  # type: ignore[arg-type]


def test_it_prints_as_aligned_tables() -> None:
    assert str(make()) == "the losses\npolicy    8  1,024\ntova    9.5  10.25\nfull      —      3\n\nmore\na\nb\n"
    assert make().table is MAIN


@pytest.mark.parametrize("installed", [False, True])
def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    monkeypatch.setattr("msrnn.evaluation.api.result.has_matplotlib", lambda: installed)
    drawn: list[Path] = []
    make(draw=drawn.append).write(tmp_path / "a" / "b")
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["losses.csv", "losses.md"]
    assert (tmp_path / "a" / "b" / "losses.md").read_text() == "# a page\n"
    assert (tmp_path / "a" / "b" / "losses.csv").read_text().splitlines()[0].startswith("policy")
    assert drawn == ([tmp_path / "a" / "b"] if installed else [])
    make().write(str(tmp_path))  # without a figure
