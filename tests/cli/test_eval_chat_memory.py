"""`msrnn eval chat-memory`: tables of versions with and without recall, and answers that are computed once."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from msrnn.evaluation.tasks import chat_memory
from msrnn.evaluation.tasks.chat_memory import answer_question
from tests.helpers.command import Run
from tests.helpers.long_chat import write_chats

FEW = ("--size", "48", "--recall", "64", "--recall-every", "16", "--max-new-tokens", "4")


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return write_chats(tmp_path / "chats.json")


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "chat-memory.jsonl").read_text().splitlines()]


def test_tables(run: Run, chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("eval", "chat-memory", chats, *FEW, "--recall-while-reading", "32", "--out", out)
    assert done.code == 0, done.err
    lines = list(csv.DictReader((out / "chat-memory.csv").open()))
    versions = dict.fromkeys((line["policy"], line["size"]) for line in lines)
    recalling = "tova + 64 recalled every 16, every 32 while reading"
    assert list(versions) == [("full", ""), ("tova", "48"), (recalling, "48")]
    counts = {line["category"]: line["questions"] for line in lines}
    assert counts == {
        "multi-hop": "1",
        "temporal": "1",
        "open-domain": "1",
        "single-hop": "3",
        "adversarial": "1",
        "answerable": "6",
        "all": "7",
    }
    page = (out / "chat-memory.md").read_text()
    assert "| tova 48 + 64 recalled every 16, every 32 while reading |" in page
    assert "against tova 48 |" in page
    assert {one["policy"] for one in records(out)} == {"full", "tova", recalling}
    assert len(records(out)) == 21
    assert {one["file"] for one in records(out)} == {"chats.json"}


def test_a_run_resumes(run: Run, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = ("eval", "chat-memory", chats, *FEW, "--policy", "tova")
    assert run(*words, "--out", whole).code == 0
    asked: list[object] = []

    def interrupted(*arguments: Any) -> object:
        if len(asked) == 9:
            raise KeyboardInterrupt
        asked.append(arguments)
        return answer_question(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(chat_memory, "answer_question", interrupted)
        assert run(*words, "--out", cut).code == 130
    assert len(records(cut)) == 9
    done = run(*words, "--out", cut)
    assert "9 of 14 answers already done" in done.err
    assert len(records(cut)) == 14
    assert (whole / "chat-memory.csv").read_text() == (cut / "chat-memory.csv").read_text()
    # Another number of recalled rows is another version; the same folder shows both.
    more = tuple("80" if word == "64" else word for word in words)
    done = run(*more, "--out", cut)
    assert "the tables also show tova 48 + 64 recalled every 16" in done.err
    assert len(records(cut)) == 21


def test_limit_and_no_recall(run: Run, chats: Path, tmp_path: Path) -> None:
    words = ("--policy", "tova", "--limit", "2", "--recall", "0", "--no-chat", "--size", "48", "--max-new-tokens", "4")
    done = run("eval", "chat-memory", chats, *words, "--out", tmp_path)
    assert done.code == 0, done.err
    assert [one["policy"] for one in records(tmp_path)] == ["tova", "tova"]
    assert {one["chat"] for one in records(tmp_path)} == {False}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--recall", "-1"), "--recall -1: must be"),
        (("--recall-every", "0"), "--recall-every 0: must be"),
        (("--recall-while-reading", "0"), "--recall-while-reading 0: must be"),
        (("--recall", "0", "--recall-while-reading", "16"), "--recall-while-reading 16: nothing is archived"),
        (("--limit", "0"), "--limit 0: must be a whole number, 1 or more"),
        (("--policy", "best"), "best"),
        (("--positions", "odd"), "--positions odd"),
    ],
)
def test_bad_options(words: tuple[str, ...], message: str, run: Run, chats: Path, tmp_path: Path) -> None:
    done = run("eval", "chat-memory", chats, *words, "--out", tmp_path / "out")
    assert done.code == 2
    assert message in done.err


def test_a_file_of_another_format(run: Run, tmp_path: Path) -> None:
    path = write_chats(tmp_path / "other.json", {"text": "hello"})
    done = run("eval", "chat-memory", path, "--out", tmp_path / "out")
    assert done.code == 2
    assert "other.json, conversation 1: not in the format of LoCoMo" in done.err
