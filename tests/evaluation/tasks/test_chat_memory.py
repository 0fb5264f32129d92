from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from msrnn.core.state import MultiState
from msrnn.errors import UsageError
from msrnn.evaluation.cells import Cell
from msrnn.evaluation.data.chat_prompts import ask_questions
from msrnn.evaluation.data.conversations import load_conversations
from msrnn.evaluation.runner import Runner
from msrnn.evaluation.store import Store
from msrnn.evaluation.task import Job
from msrnn.evaluation.tasks import chat_memory
from msrnn.evaluation.tasks.chat_memory import CHECK, ChatMemory, answer_question, make_rnn, read_conversation
from msrnn.hf.rnn import MultiStateRNN
from msrnn.recall import Recall
from tests.helpers.characters import END, character_model, character_tokenizer
from tests.helpers.long_chat import write_chats

TOKENIZER = character_tokenizer()
FULL, TOVA = Cell("full", None), Cell("tova", 48)
RECALL = Cell("tova + 64 recalled every 16, every 64 while reading", 48)
NEW = 6


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return character_model().eval()


@pytest.fixture(scope="module")
def task(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> ChatMemory:
    chats = load_conversations(write_chats(tmp_path_factory.mktemp("chats") / "chats.json"))
    asked = [one for chat in chats for one in ask_questions(TOKENIZER, chat, True)]
    return ChatMemory(model, TOKENIZER, asked, True, NEW, "original", {"commit": "abc"})


def job(task: ChatMemory, cell: Cell) -> Job[Cell, str]:
    return Job(cell, task.items(cell), 1, lambda _: [])


def test_versions_of_the_model(model: PreTrainedModel) -> None:
    found = make_rnn(RECALL, model, "original")
    assert (found.spec.recall, found.recall_while_reading) == (Recall(64, 16, "device"), 64)
    assert make_rnn(TOVA, model, "compact").spec.fingerprint["positions"] == "compact"
    assert make_rnn(TOVA, model, "original").spec.recall is None
    assert make_rnn(FULL, model, "original").spec.sizes == [None, None]


def test_a_record_whose_recall_is_apart_is_refused() -> None:
    """Its policy would stand for the version without recall."""
    texts = dict.fromkeys(("item", "conversation", "question", "answer", "expected", "fingerprint", "dtype"), "a")
    record: dict[str, Any] = {
        "policy": "tova",
        "size": 8,
        "category": 1,
        "choices": [],
        "positions": "original",
        **texts,
    }
    assert CHECK(record) is None
    assert "its recall apart" in str(CHECK({**record, "recall": 64}))


def test_questions_of_one_conversation_are_answered_together(task: ChatMemory) -> None:
    batches = task.batches(job(task, TOVA))
    assert [len(batch) for batch in batches] == [5, 2]
    first = [task.asked[batch[0]] for batch in batches]
    assert [one.conversation for one in first] == ["ann-ben", "cara-dan"]
    tails = sum(len(one.tail) + NEW for one in task.asked.values())
    assert task.work(job(task, TOVA)) == sum(len(one.head) for one in first) + tails


def read_alone(rnn: MultiStateRNN, head: Any) -> MultiState:
    state = rnn.state()
    rnn.read(torch.tensor([head]), state, recall_every=rnn.recall_while_reading)
    return state


def answer_alone(rnn: MultiStateRNN, state: MultiState, tail: Any) -> list[int]:
    """Greedy decoding, step by step."""
    logits = rnn.read_prompt(torch.tensor([tail]), state, None)
    said: list[int] = []
    while len(said) < NEW:
        token = int(logits[0, -1].argmax())
        if token == END:
            break
        said.append(token)
        logits = rnn.step(torch.tensor([[token]]), state)
    return said


SLOW = pytest.param(TOVA, marks=pytest.mark.slow)


@pytest.mark.parametrize("cell", [FULL, SLOW, RECALL], ids=lambda cell: getattr(cell, "label", None))
def test_answers_are_greedy_and_each_as_alone(model: PreTrainedModel, task: ChatMemory, cell: Cell) -> None:
    store, counted = Store(None), list[int]()
    run = Runner(task, store, model)
    for _ in run.compute_items(cell, task.items(cell), counted.append):
        pass
    assert sum(counted) == task.work(job(task, cell))
    assert [record["item"] for record in store.records] == task.items(cell)
    rnn = make_rnn(cell, model, "original")
    states = {head: read_alone(rnn, head) for head in {task.asked[record["item"]].head for record in store.records}}
    for record in store.records:
        asked = task.asked[record["item"]]
        alone = answer_alone(rnn, states[asked.head].fork(1), asked.tail)
        assert record["answer"] == TOKENIZER.decode(alone, skip_special_tokens=True).strip()
        assert record["answer_tokens"] == len(alone)
        assert record["expected"] == asked.question.expected
        assert CHECK(record) is None
        assert task.cell_of(record) == cell


def test_a_conversation_is_read_once(model: PreTrainedModel, task: ChatMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counted(rnn: MultiStateRNN, ids: tuple[int, ...], on_tokens: Any) -> Any:
        read.append(len(ids))
        return read_conversation(rnn, ids, on_tokens)

    monkeypatch.setattr(chat_memory, "read_conversation", counted)
    Runner(task, Store(None), model).results([TOVA])
    assert read == [len(task.asked[batch[0]].head) for batch in task.batches(job(task, TOVA))]


def test_a_question_leaves_the_state_as_it_was(model: PreTrainedModel, task: ChatMemory) -> None:
    rnn = make_rnn(RECALL, model, "original")
    one, *_, other = (asked for asked in task.asked.values() if asked.conversation == "ann-ben")
    state = read_conversation(rnn, one.head, lambda _: None)
    first = answer_question(rnn, state, one.tail, NEW, [END])
    answer_question(rnn, state, other.tail, NEW, [END])
    assert int(state.seen) == len(one.head)
    assert answer_question(rnn, state, one.tail, NEW, [END]) == first


def test_a_repetition_penalty_of_the_model_is_off(
    model: PreTrainedModel, task: ChatMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy means the most likely token; a model's own config may say otherwise."""
    rnn, one = make_rnn(TOVA, model, "original"), next(iter(task.asked.values()))
    state = read_conversation(rnn, one.head, lambda _: None)
    plain = answer_question(rnn, state, one.tail, NEW, [END])
    for name, value in (("repetition_penalty", 50.0), ("do_sample", True), ("temperature", 9.0)):
        monkeypatch.setattr(model.generation_config, name, value)
    assert answer_question(rnn, state, one.tail, NEW, [END]) == plain


def test_numbers_that_are_not_finite_are_refused(task: ChatMemory) -> None:
    broken = character_model().eval()
    broken.lm_head.weight.data[7] = float("nan")
    rnn, one = make_rnn(TOVA, broken, "original"), next(iter(task.asked.values()))
    state = read_conversation(rnn, one.head, lambda _: None)
    with pytest.raises(UsageError, match="not finite"):
        answer_question(rnn, state, one.tail, NEW, [END])


def test_scores_come_from_records(task: ChatMemory) -> None:
    some: dict[str, Any] = {"expected": "a boat, a cat", "choices": []}
    records = [
        {"item": "a", "category": 1, "answer": "boats", **some},
        {"item": "b", "category": 5, "answer": "(b)", "expected": "", "choices": ["x", "not mentioned"]},
    ]
    assert task.read(records) == {"a": 0.5, "b": 1.0}


def test_without_a_chat_template_the_first_line_counts(
    model: PreTrainedModel, task: ChatMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = TOKENIZER(" Ann\nQuestion", add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(chat_memory, "answer_question", lambda *_: tokens)
    for template, answer in ((False, "Ann"), (True, "Ann\nQuestion")):
        same = ChatMemory(model, TOKENIZER, [*task.asked.values()], template, NEW, "original", {})
        run = Runner(same, Store(None), model)
        run.results([TOVA])
        assert {record["answer"] for record in run.records([TOVA])} == {answer}
