from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from msrnn.evaluation.cells import Cell
from msrnn.evaluation.data.problems import GSM8K, load_problems
from msrnn.evaluation.data.reasoning_prompts import ask_problems
from msrnn.evaluation.runner import Runner
from msrnn.evaluation.store import Store
from msrnn.evaluation.task import Job
from msrnn.evaluation.tasks import reasoning
from msrnn.evaluation.tasks.math_verifier import MathVerifier
from msrnn.evaluation.tasks.reasoning import (
    CHECK,
    FULL_CASE,
    SCORING,
    Case,
    Drawing,
    Reasoning,
    count_protected,
    make_rnn,
    score_record,
)
from msrnn.hf.rnn import MultiStateRNN
from tests.helpers.characters import END, character_model, character_tokenizer
from tests.helpers.problem_files import write_halves, write_sums

TOKENIZER = character_tokenizer()
TOVA, PROTECTED = Case("tova", 48), Case("tova", 48, "prompt")
RECALL = Case("tova + 16 recalled", 48, "prompt")
GREEDY, SAMPLED = Drawing(1, 0.0, 0, 8), Drawing(2, 0.7, 3, 8)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return character_model().eval()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("problems")
    return [write_sums(folder), write_halves(folder)]


def make_task(
    model: PreTrainedModel, files: list[Path], drawing: Drawing = GREEDY, together: int = 1, chat: bool = True
) -> Reasoning:
    asked = ask_problems(TOKENIZER, load_problems(files), together, chat)
    return Reasoning(model, TOKENIZER, asked, drawing, chat, "original", {"commit": "abc"})


def compute(task: Reasoning, model: PreTrainedModel, case: Case) -> list[dict[str, Any]]:
    """The records of a case, by item."""
    store = Store(None)
    for _ in Runner(task, store, model).compute_items(case, task.items(case), lambda _: None):
        pass
    return sorted(store.records, key=lambda record: task.items(case).index(record["item"]))


def test_names_of_versions() -> None:
    assert [case.label for case in (FULL_CASE, TOVA, PROTECTED, RECALL)] == [
        "full",
        "tova 48",
        "tova 48, prompt protected",
        "tova 48 + 16 recalled, prompt protected",
    ]
    assert PROTECTED.without_protection == TOVA
    assert RECALL.without_recall == PROTECTED
    assert TOVA.key != PROTECTED.key


def answer_alone(model: PreTrainedModel, case: Case, ids: tuple[int, ...], new: int) -> list[int]:
    """Greedy decoding, step by step; the first tokens are read as protected ones."""
    rnn = make_rnn(case.cell, model, "original", len(ids) + new)
    state, first = rnn.state(), count_protected(rnn, len(ids)) if case.protect == "prompt" else 0
    if first:
        rnn.read(torch.tensor([ids[:first]]), state, protect=True)
    logits = rnn.read_prompt(torch.tensor([ids[first:]]), state, None)
    said: list[int] = []
    while len(said) < new and (token := int(logits[0, -1].argmax())) != END:
        said.append(token)
        logits = rnn.step(torch.tensor([[token]]), state)
    return said


@pytest.mark.parametrize("case", [FULL_CASE, TOVA, PROTECTED], ids=lambda case: case.label)
def test_answers_are_greedy_and_each_as_alone(model: PreTrainedModel, files: list[Path], case: Case) -> None:
    task = make_task(model, files)
    counted: list[int] = []
    store = Store(None)
    for _ in Runner(task, store, model).compute_items(case, task.items(case), counted.append):
        pass
    assert sum(counted) == task.work(Job(case, task.items(case), 1, lambda _: []))
    for record in store.records:
        asked = task.asked[record["item"].removesuffix("-0")]
        alone = answer_alone(model, case, asked.ids, GREEDY.max_new_tokens)
        assert record["answer"] == TOKENIZER.decode(alone, skip_special_tokens=True).strip()
        assert (record["answer_tokens"], record["ended"]) == (len(alone), len(alone) < GREEDY.max_new_tokens)
        assert record["tokens"] == len(asked.ids)
        assert record["protected"] == (36 if case == PROTECTED else 0)
        assert (record["expected"], record["scoring"]) == ([asked.problems[0].expected], SCORING)
        assert CHECK(record) is None
        assert task.cell_of(record) == case


def test_protection_changes_answers(model: PreTrainedModel, files: list[Path]) -> None:
    """Otherwise it would not have reached the engine."""
    task = make_task(model, files)
    assert [one["answer"] for one in compute(task, model, TOVA)] != [
        one["answer"] for one in compute(task, model, PROTECTED)
    ]


@pytest.mark.parametrize(
    ("policy", "size", "tokens", "protected"),
    [
        ("tova", 48, 20, 20),
        ("tova", 48, 100, 36),  # a quarter is for the answer
        ("window+4", 48, 100, 36),
        ("h2o", 48, 100, 23),  # half are the newest tokens, and one must be free
        ("tova", 2, 100, 1),
        ("full", None, 100, 100),
    ],
)
def test_as_much_is_protected_as_fits(
    policy: str, size: int | None, tokens: int, protected: int, model: PreTrainedModel
) -> None:
    rnn = MultiStateRNN(model, policy, size) if size else MultiStateRNN(model, "full", None)
    assert count_protected(rnn, tokens) == protected
    if size:
        rnn.spec.check_protect(protected)


def test_samples_are_reproducible_and_differ(model: PreTrainedModel, files: list[Path]) -> None:
    task = make_task(model, files, SAMPLED)
    first, again = (compute(task, model, TOVA) for _ in range(2))
    said = [one["answer"] for one in first]
    assert said == [one["answer"] for one in again]
    assert len(set(said)) == len(said) == 10
    assert [one["sample"] for one in first] == [0, 1] * 5
    other = compute(make_task(model, files, SAMPLED._replace(seed=4)), model, TOVA)
    assert not set(said) & {one["answer"] for one in other}
    # A third sample leaves the first two as they are.
    more = make_task(model, files, SAMPLED._replace(samples=3))
    assert set(task.items(TOVA)) < set(more.items(TOVA))
    assert [one["answer"] for one in compute(more, model, TOVA) if one["sample"] < 2] == said


def test_keys_of_drawings() -> None:
    assert GREEDY.key == GREEDY._replace(seed=5).key
    assert SAMPLED.key == SAMPLED._replace(samples=5).key
    others = [SAMPLED._replace(seed=5), SAMPLED._replace(temperature=1.0), SAMPLED._replace(max_new_tokens=9), GREEDY]
    assert all(one.key != SAMPLED.key for one in others)


def test_several_problems_in_one_answer(model: PreTrainedModel, files: list[Path]) -> None:
    task = make_task(model, files, together=2)
    records = compute(task, model, TOVA)
    assert [len(one["right"]) for one in records] == [2, 1, 2]
    assert [one["expected"] for one in records] == [["2", "4"], ["8"], [r"\frac{1}{2}", r"\frac{3}{2}"]]
    asked = next(iter(task.asked.values()))
    assert GREEDY.params(asked, 0, [END], True).max_tokens == 16


def test_a_plain_answer_ends_before_another_problem(
    model: PreTrainedModel, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last number would be that of the other problem."""
    task = make_task(model, files, chat=False)
    asked = next(iter(task.asked.values()))
    assert GREEDY.params(asked, 0, [END], False).stop == ("\nProblem:",)
    assert GREEDY.params(asked, 0, [END], True).stop == ()
    tokens = TOKENIZER("so \\boxed{2}\n\nProblem:\n3 + 4? \\boxed{7}", add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(reasoning, "answer_prompts", lambda *_: iter([(0, tokens, 0.1)]))
    (record,) = task.prepare(Job(TOVA, task.items(TOVA)[:1], 1, lambda _: []), model)(
        task.items(TOVA)[:1], lambda _: None
    )
    assert (record["answer"], record["right"]) == ("so \\boxed{2}", [True])


def test_scores() -> None:
    numbers = {"dataset": GSM8K, "expected": ["18", "3"], "answer": "Answer 1: \\boxed{18.0}\nAnswer 2: 4"}
    latex = {"dataset": "MATH-500", "expected": [r"\frac12"], "answer": r"\boxed{0.5}"}
    with MathVerifier() as verifier:
        assert score_record(numbers, verifier) == {
            "extracted": ["18.0", "4"],
            "right": [True, False],
            "scoring": SCORING,
        }
        assert score_record(latex, verifier)["right"] == [True]
        assert score_record({**latex, "answer": "0.5"}, verifier) == {
            "extracted": [None],
            "right": [False],
            "scoring": SCORING,
        }


def test_answers_that_another_version_has_scored_are_scored_again(model: PreTrainedModel, files: list[Path]) -> None:
    task = make_task(model, files)
    old = {"dataset": GSM8K, "expected": ["18"], "answer": "18", "answer_tokens": 2, "ended": True}
    record = {**old, "item": "a", "right": [False], "protected": 1, "tokens": 4}
    assert task.read([{**record, "scoring": SCORING}])["a"].right == (False,)
    assert task.read([{**record, "scoring": 0}])["a"] == ((True,), 2, True, 0.25)


def test_versions_of_the_model(model: PreTrainedModel) -> None:
    assert make_rnn(FULL_CASE.cell, model, "original", 99).spec.sizes == [99, 99]
    assert make_rnn(Cell("tova", 48), model, "compact", 99).spec.fingerprint["positions"] == "compact"
    assert make_rnn(RECALL.cell, model, "original", 99).spec.recall is not None


def test_damaged_records() -> None:
    assert "without the field" in str(CHECK({"policy": "tova"}))
