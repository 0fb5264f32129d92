from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from msrnn.evaluation.data.texts import Choice, Chunk, Data, Document, choose
from msrnn.evaluation.loss import losses
from msrnn.evaluation.runner import Progress, Runner
from msrnn.evaluation.store import Store
from msrnn.evaluation.tasks import extrapolation
from msrnn.evaluation.tasks.extrapolation import (
    Case,
    Course,
    Extrapolation,
    Report,
    Results,
    SavedStates,
    cases,
    figure,
    leg_nll,
    states_folder,
)
from tests.helpers.letters import Letters
from tests.helpers.tiny import build, llama, tokens

LENGTH, SIZE = 53, 8
COURSE = Course(LENGTH, given=1, window=5, leg=15)
CASES = cases(["tova@compressed", "window+4@compact", "tova@original"], SIZE)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama())


@pytest.fixture
def data() -> Data:
    made = [Chunk(f"book {i}", 0, row) for i, row in enumerate(tokens(3, LENGTH).tolist())]
    return Data(made, [], LENGTH, 3, 0, 3, 0)


def run(
    model: PreTrainedModel, data: Data, store: Store, course: Course = COURSE, batch: int = 2
) -> Runner[Case, str, list[float]]:
    task = Extrapolation(model, data, course, states_folder(store), {"note": "metadata"})
    return Runner(task, store, model, batch)


@pytest.mark.parametrize("given", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_windows_of_legs_are_those_of_the_whole(model: PreTrainedModel, data: Data, case: Case, given: int) -> None:
    course, ids = COURSE._replace(given=given), torch.tensor([chunk.ids for chunk in data.chunks])
    rnn = case.rnn(model)
    whole = losses(rnn, ids, rnn.state(3)).double()
    state, found = rnn.state(3), list[list[float]]([[], [], []])
    for leg in course.legs():
        for text, nll in zip(found, leg_nll(rnn, ids, state, course, leg), strict=True):
            text += nll
        assert state.seen.tolist() == [leg[1] - 1] * 3
    for text, row in zip(found, whole, strict=True):
        costs = [0.0] * given + row[given - 1 :].tolist()
        assert text == pytest.approx([sum(costs[i : i + 5]) for i in range(0, LENGTH, 5)], rel=1e-5)
    assert sum(course.counts) == LENGTH - given
    assert course.counts == [5 - given, *[5] * 9, 3]


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
        "saving": (SavedStates, "save"),
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


def test_rows() -> None:
    assert CASES[0] == Case("tova", "compressed:lnln", SIZE)
    assert cases(["tova", "tova@compressed", "tova@compressed:lnln", "full"], SIZE) == [
        CASES[0],
        Case("full", "original", None),
    ]
    for row, reason in {
        "tovas@compact": "did you mean 'tova'",
        "tova@xyz": "positions='xyz'",
        "full@compact": "row 'full@compact'",
    }.items():
        with pytest.raises(ValueError, match=reason):
            cases([row], SIZE)


def test_the_first_tokens_of_every_text_that_has_them() -> None:
    texts = {"long": "abcdefghij" * 3, "longer": "klmnopqrst" * 5, "short": "uvw"}
    found = [Document(name, lambda name=name: texts[name]) for name in texts]  # type: ignore[misc]
    made = choose(found, Letters(), Choice(12, chunks_per_book=1, first=True))
    assert [(chunk.book, chunk.start) for chunk in made.chunks] == [("long", 0), ("longer", 0)]
    assert made.short == 1


@pytest.fixture
def report() -> Report:
    windows = [4, *[5] * 9, 3]
    flat = [math.log(10) * n for n in windows]
    rising = [math.log(10 + i) * n for i, n in enumerate(windows)]
    results: Results = {CASES[0]: [flat, flat], CASES[1]: [rising, flat]}
    return Report(results, COURSE)


def test_means_so_far_and_by_window(report: Report) -> None:
    assert [e.value for e in report.so_far[CASES[0]]] == pytest.approx([10.0] * 11)
    last = report.windows[CASES[1]][-1]
    assert last.value == pytest.approx(math.sqrt(20 * 10))
    assert (last.low, last.high) == (pytest.approx(10.0), pytest.approx(20.0))
    so_far = report.so_far[CASES[1]][1].value
    assert so_far == pytest.approx(math.exp((4 * math.log(10) + 5 * math.log(11) + 9 * math.log(10)) / 18))
    assert [report.ends[i] for i in report.columns] == [5, 10, 20, 40, 53]


def test_files(report: Report, tmp_path: Path) -> None:
    lines = list(csv.DictReader(report.tables("")[0].csv().splitlines()))
    assert len(lines) == 2 * 11
    assert (lines[10]["tokens"], lines[10]["positions"], lines[10]["texts"]) == ("53", "compressed:lnln", "2")
    assert float(lines[10]["so_far"]) == pytest.approx(10.0)
    text = report.markdown("a model", {"commit": "abc"})
    assert "| tova@compressed:lnln | 10.00 · 10.00–10.00 |" in text  # noqa: RUF001
    assert "- commit: abc" in text
    figure(report, tmp_path, "a model", 40)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["extrapolation.png", "extrapolation.svg"]
