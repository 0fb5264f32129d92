from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from msrnn.evaluation.cells import Cell
from msrnn.evaluation.data.needles import TASKS, Haystack, Sample
from msrnn.evaluation.runner import Runner
from msrnn.evaluation.store import Store
from msrnn.evaluation.task import Job
from msrnn.evaluation.tasks.retrieval import CHECK, Case, Report, Retrieval, figure
from msrnn.hf.rnn import MultiStateRNN
from tests.helpers.characters import character_model, character_tokenizer
from tests.helpers.word_counts import TEXTS

TOKENIZER = character_tokenizer()
SAMPLES = [Sample("number", length, depth, 0) for length in (600, 500) for depth in (0.0, 1.0)]
FULL, TOVA = Case("full", None, "last"), Case("tova", 24, "last")
RECALLING = Case("tova + 8 recalled", 24, "last")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return character_model().eval()


@pytest.fixture(scope="module")
def task(model: PreTrainedModel) -> Retrieval:
    haystack = Haystack(TOKENIZER, "\n\n".join(TEXTS.values()), False, 0)
    asked = [haystack.ask(sample, place) for place in ("first", "last") for sample in SAMPLES]
    return Retrieval(model, TOKENIZER, asked, "original", {"commit": "abc"})


def job(task: Retrieval, case: Case) -> Job[Case, str]:
    return Job(case, task.items(case), 2, lambda _: [])


def test_a_case() -> None:
    assert (TOVA.cell, TOVA.label) == (Cell("tova", 24), "tova 24, question last")
    assert TOVA.key == {**Cell("tova", 24).key, "question": "last"}
    assert Case("full", None, "first").label == "full, question first"
    assert RECALLING.label == "tova 24 + 8 recalled, question last"


def test_prompts_of_one_length_are_answered_at_once(task: Retrieval) -> None:
    lengths = {item: task.asked["last"][item].sample.length for item in task.items(TOVA)}
    batches = task.batches(job(task, TOVA))
    assert [[lengths[item] for item in batch] for batch in batches] == [[500, 500], [600, 600]]
    prompts = [one.prompt.ids for one in task.asked["last"].values()]
    assert task.work(job(task, TOVA)) == sum(map(len, prompts)) + 4 * TASKS["number"].tokens


@pytest.mark.parametrize("case", [FULL, TOVA, RECALLING], ids=lambda case: case.policy)
def test_answers_are_greedy_and_each_as_alone(model: PreTrainedModel, task: Retrieval, case: Case) -> None:
    store = Store(None)
    Runner(task, store, model, batch=2).results([case])
    rnn = MultiStateRNN(model, **case.cell.options)
    for record in store.records:
        asked = task.asked["last"][record["item"]]
        ids = torch.tensor([asked.prompt.ids])
        out = rnn.generate(ids, max_new_tokens=TASKS["number"].tokens, do_sample=False)[0, ids.shape[1] :]
        assert record["answer"] == TOKENIZER.decode(out, skip_special_tokens=True)
        assert record["expected"] == asked.answers
        assert CHECK(record) is None
        assert task.cell_of(record) == case


def test_an_answer_counts_by_what_it_has_of_the_expected_values(task: Retrieval) -> None:
    records = [
        {"item": "a", "answer": "it is 12 and 34", "expected": ["12", "34"]},
        {"item": "b", "answer": "it is 12", "expected": ["12", "34"]},
        {"item": "c", "answer": "", "expected": ["12"]},
    ]
    assert task.read(records) == {"a": 1.0, "b": 0.5, "c": 0.0}


def report(task: Retrieval, tova: Sequence[float] = (1, 0, 1, 1)) -> Report:
    return Report({FULL: [1.0] * 4, TOVA: [*tova]}, task.asked)


def test_shares_of_right_answers(task: Retrieval) -> None:
    found = report(task)
    assert found.accuracy(Cell("tova", 24), "first") is None
    whole = found.accuracy(Cell("tova", 24), "last")
    assert whole is not None
    assert whole.estimate.value == 0.75
    deep = found.accuracy(Cell("tova", 24), "last", lambda one: one.sample.depth == 1.0)
    assert deep is not None
    assert deep.estimate.value == 0.5


def test_tables_by_length_depth_and_task(task: Retrieval) -> None:
    tables = report(task).tables("a title")
    assert [table.header for table in tables] == [
        ["tokens", "500", "600", "all"],
        ["depth", "0%", "100%", "all"],
        ["task", "number", "all"],
    ]
    assert [row[0] for row in tables[0].strings()] == ["full", "tova 24"]
    lines = [*csv.DictReader(io.StringIO(tables[0].csv()))]
    shares = {(line["policy"], line["length"], line["depth"]): float(line["accuracy"]) for line in lines}
    assert shares["tova", "600", "1.0"] == 0
    assert sum(shares.values()) == 7


def test_a_figure(task: Retrieval, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure(report(task), tmp_path, "a title")
    assert {path.name for path in tmp_path.iterdir()} == {"retrieval.png", "retrieval.svg"}
