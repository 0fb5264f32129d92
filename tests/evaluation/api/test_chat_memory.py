"""`msrnn.evaluation.chat_memory`: the numbers are those of the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from msrnn import evaluation
from msrnn.errors import UsageError
from msrnn.evaluation.api.chat_memory import chat_memory_cells, check_questions
from msrnn.evaluation.data.conversations import load_conversations
from tests.helpers.characters import character_tokenizer
from tests.helpers.long_chat import write_chats
from tests.helpers.word_counts import without_cost

POLICIES = ["tova", "tova + 64 recalled every 16"]
FEW: dict[str, Any] = {
    "tokenizer": character_tokenizer(),
    "max_new_tokens": 4,
    "limit": 3,
}


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return write_chats(tmp_path / "chats.json")


def clean(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in one.items() if k not in ("reading_seconds", "file")} for one in without_cost(records)]


def test_chat_memory_is_that_of_the_command(
    of_chat_command: Any, chats: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    words = ("--policy", "tova", "--size", "48", "--recall", "64", "--recall-every", "16", "--limit", "3")
    expected = of_chat_command(tmp_path / "out", chats, *words, "--max-new-tokens", "4")
    result = evaluation.chat_memory(model, chats, POLICIES, [48], **FEW)
    assert clean(result.records) == clean(expected)
    assert result.table.csv() == (tmp_path / "out" / "chat-memory.csv").read_text()
    given = evaluation.chat_memory(model, load_conversations(chats), POLICIES, [48], **FEW)
    assert clean(given.records) == clean(result.records)


def test_cells() -> None:
    def labels(*arguments: Any) -> list[str]:
        return [cell.label for cell in chat_memory_cells(*arguments)]

    assert labels(["tova", "tova + 64 recalled", "full"], [8, 16]) == [
        "full",
        "tova 8",
        "tova 16",
        "tova 8 + 64 recalled",
        "tova 16 + 64 recalled",
    ]
    assert labels(["full"], [8]) == ["full"]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((["tovas"], [8]), "tovas"),
        (([], [8]), "policies"),
        ((["tova + 0 recalled"], [8]), "recall"),
        ((["tova + 64 recalled every 0"], [8]), "recall_every"),
        ((["tova + 64 recalled, every 0 while reading"], [8]), "recall_while_reading"),
        ((["full + 64 recalled"], [8]), "evicts nothing"),
    ],
)
def test_cells_that_are_refused(arguments: Any, name: str) -> None:
    with pytest.raises(UsageError, match=name):
        chat_memory_cells(*arguments)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((0, 1, "auto"), "limit"), ((1, 0, "auto"), "max_new_tokens"), ((1, 1, "odd"), "positions")],
)
def test_questions_that_are_refused(arguments: Any, name: str) -> None:
    with pytest.raises(UsageError, match=name):
        check_questions(*arguments)


def test_positions_are_compressed_past_the_training_length(
    model: PreTrainedModel, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for known, positions in ((10_000, "original"), (500, "compressed:lnln")):
        monkeypatch.setattr(model.config, "max_position_embeddings", known)
        result = evaluation.chat_memory(model, chats, POLICIES, [48], **FEW)
        assert {record["positions"] for record in result.records} == {positions}


def test_recall_that_is_impossible_is_refused_before_anything_is_computed(
    model: PreTrainedModel, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.config, "max_position_embeddings", 100)
    with pytest.raises(UsageError, match="recall"):
        evaluation.chat_memory(model, chats, ["full", *POLICIES[::-1]], [48], **FEW, folder=tmp_path / "out")
    assert not (tmp_path / "out" / "chat-memory.jsonl").exists()
