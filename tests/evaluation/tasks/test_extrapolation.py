from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from msrnn.evaluation.data.texts import Data
from msrnn.evaluation.runner import Progress, Runner
from msrnn.evaluation.store import Store
from msrnn.evaluation.tasks import extrapolation
from msrnn.evaluation.tasks.extrapolation import Extrapolation
from msrnn.evaluation.tasks.extrapolation_cases import Case
from msrnn.evaluation.tasks.extrapolation_legs import Course
from msrnn.evaluation.tasks.leg_states import LegStates, states_folder
from tests.helpers.courses import CASES, COURSE, LENGTH, three_texts
from tests.helpers.tiny import build, llama


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama())


@pytest.fixture
def data() -> Data:
    return three_texts()


def run(
    model: PreTrainedModel, data: Data, store: Store, course: Course = COURSE, batch: int = 2
) -> Runner[Case, str, list[float]]:
    task = Extrapolation(model, data, course, states_folder(store), {"note": "metadata"})
    return Runner(task, store, model, batch)


def test_where_tokens_stand_matters(model: PreTrainedModel, data: Data) -> None:
    found = run(model, data, Store(None)).results(CASES)
    assert all(len(text) == 11 for texts in found.values() for text in texts)
    assert len({texts[0][-1] for texts in found.values()}) == 3
    assert len({round(texts[0][0], 3) for texts in found.values()}) == 1, "as long as nothing has left, it does not"


@pytest.mark.parametrize("stop_at", [1, 2, 3, 5])
@pytest.mark.parametrize("when", ["reading", "saving", "appending"])
def test_goes_on_in_the_middle_of_a_text(
    model: PreTrainedModel, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int, when: str
) -> None:
    """Wherever it is killed: no leg that is in the store is read again, and the answer is the same."""
    expected = run(model, data, Store(None)).results(CASES[:1])
    store, calls = Store(tmp_path / "x.jsonl"), list[int]()

    def killed(original: object) -> object:
        def wrapper(*arguments: object, **named: object) -> object:
            calls.append(1)
            if len(calls) == stop_at:
                raise KeyboardInterrupt
            return original(*arguments, **named)  # type: ignore[operator]

        return wrapper

    place: tuple[Any, str] = {
        "reading": (extrapolation, "leg_nll"),
        "saving": (LegStates, "save"),
        "appending": (Store, "append"),
    }[when]
    with monkeypatch.context() as patch:
        patch.setattr(*place, killed(getattr(*place)))
        with pytest.raises(KeyboardInterrupt):
            run(model, data, store).results(CASES[:1])

    rows, read = Store(tmp_path / "x.jsonl"), list[int]()
    done = sum(row["stop"] - row["start"] for row in rows.records for _ in row["chunks"])
    found = run(model, data, rows).results(CASES[:1], Progress(total=read.append))
    assert read == [3 * LENGTH - done]
    for mine, theirs in zip(found[CASES[0]], expected[CASES[0]], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"], "states are of no use at the end"
    assert len(rows.records) == 2 * 4


def test_a_state_that_is_gone_costs_the_text(model: PreTrainedModel, data: Data, tmp_path: Path) -> None:
    store = Store(tmp_path / "x.jsonl")
    run(model, data, store).results(CASES[:1])
    rows = [row for row in store.records if row["start"] != 45]
    kept = Store(None)
    kept.records = rows
    read: list[int] = []
    run(model, data, kept).results(CASES[:1], Progress(total=read.append))
    assert read == [3 * LENGTH]


def test_other_legs_and_more_cases_share_what_is_there(model: PreTrainedModel, data: Data, tmp_path: Path) -> None:
    store, read = Store(tmp_path / "x.jsonl"), list[int]()
    first = run(model, data, store).results(CASES[:1])
    again = run(model, data, store, COURSE._replace(leg=25), batch=1).results(CASES[:1], Progress(total=read.append))
    assert (read, again) == ([0], first)
    run(model, data, store).results(CASES, Progress(total=read.append))
    assert read[1:] == [2 * 3 * LENGTH]
    assert {row["note"] for row in store.records} == {"metadata"}
