from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from msrnn import evaluation
from msrnn.errors import UsageError
from msrnn.evaluation.benchmark.contenders import Bounded, Contender, Setup
from msrnn.policy import Policy
from tests.helpers.tiny import build, llama

FEW: dict[str, Any] = {"length": 20, "batch": 1}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.evaluation.benchmark.timing.BUFFER_BYTES", {"cpu": 2**20})
    monkeypatch.setattr("msrnn.evaluation.benchmark.timing.ROUNDS", 1)
    monkeypatch.setattr("msrnn.evaluation.benchmark.measurement.REPEATS", 0)


def labels(result: evaluation.EvaluationResult[Any]) -> list[str]:
    return [row.label for row in result.report]


def test_the_measurements_of_a_folder_are_not_made_again(model: PreTrainedModel, tmp_path: Path) -> None:
    first = evaluation.efficiency(model, "tova", [8], folder=tmp_path, **FEW)
    assert labels(first) == ["full", "full, dynamic", "tova 8"]
    assert all(row.batch == 1 and row.throughput and row.whole != 0 for row in first.report)
    full, _, bounded = first.report
    assert bounded.nbytes < full.nbytes
    assert first.facts["length"] == 20
    assert "tova 8" in str(first)
    before, notes = (tmp_path / "efficiency.jsonl").read_bytes(), list[str]()
    again = evaluation.efficiency(
        model, "tova", [8], folder=tmp_path, **FEW, progress=evaluation.Progress(note=notes.append)
    )
    assert (again.report, again.records) == (first.report, first.records)
    assert (tmp_path / "efficiency.jsonl").read_bytes() == before
    assert notes == [f"{sum(record['cell'] != 'row' for record in first.records)} measurements already done"]
    other = evaluation.efficiency(model, Policy.parse("window"), [4], folder=tmp_path, **FEW)
    assert (labels(other)[2:], other.others) == (["window 4", "tova 8"], ["tova 8"])
    renamed = evaluation.efficiency(model, "tova", [4], folder=tmp_path, about={"model": "another"}, **FEW)
    assert (renamed.others, renamed.left_out) == ([], len(other.records))


def test_other_contenders(model: PreTrainedModel) -> None:
    def sinks(setup: Setup, size: int) -> Contender:
        return Bounded(setup.model, "window+4", size)

    result = evaluation.efficiency(model, "tova", [8], others=[sinks], state_dtypes=["int8"], **FEW)
    assert labels(result)[2:] == ["tova 8 int8", "window+4 8"]
    assert result.report[2].nbytes < result.report[3].nbytes


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("size", {"sizes": [8, 0]}),
        ("policy", {"policy": "full"}),
        ("length", {"length": 16}),
        ("state_dtype", {"state_dtypes": ["int3"]}),
        ("positions", {"positions": ["compac"]}),
        ("batch", {"batch": 0}),
        ("max_batch", {"max_batch": 2**16 + 1}),
    ],
)
def test_values_that_are_refused(name: str, more: dict[str, Any], model: PreTrainedModel) -> None:
    with pytest.raises(UsageError) as refused:
        evaluation.efficiency(model, **{**FEW, **more})
    assert refused.value.name == name


def test_a_folder_needs_the_name_of_the_model(tmp_path: Path) -> None:
    """Two models without a name would share their measurements."""
    with pytest.raises(UsageError) as refused:
        evaluation.efficiency(build(llama()), "tova", [8], folder=tmp_path / "new", **FEW)
    assert refused.value.name == "about"
    assert not (tmp_path / "new").exists()
