"""The programs in examples/ run as their docstrings say."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from msrnn.hf import loading
from msrnn.hf.loading import Loaded
from tests.helpers.characters import character_model, character_tokenizer

EXAMPLES = Path(__file__).parent.parent / "examples"
BOOK = "The captain opened the door and looked at the sea. It was a dark and stormy night, and nobody slept. " * 4


@pytest.fixture
def loaded_once(small: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with a book. The model that other tests use is loaded already."""

    def load(name: str | None) -> Loaded:
        assert name is None
        return small

    monkeypatch.setattr(loading, "load", load)
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(BOOK)


def run(monkeypatch: pytest.MonkeyPatch, program: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    runpy.run_path(str(EXAMPLES / program), run_name="__main__")


@pytest.mark.parametrize("program", ["compare_policies.py", "endless_chat.py", "read_once.py"])
def test_help(program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every program can be imported, and says what it does."""
    assert program in {path.name for path in EXAMPLES.glob("*.py")}
    with pytest.raises(SystemExit, match="0"):
        run(monkeypatch, program, "--help")
    assert "--model" in capsys.readouterr().out


def test_every_program_is_tested() -> None:
    text = Path(__file__).read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if f'run(monkeypatch, "{path.name}"' not in text] == []


@pytest.mark.slow
@pytest.mark.small_model
@pytest.mark.usefixtures("loaded_once")
def test_chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    messages = iter(["Name a color.", "Another one.", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(messages))
    run(monkeypatch, "endless_chat.py")
    turns = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert len(turns) == 2
    assert len({turn.partition("read, ")[2] for turn in turns}) == 1  # the same bytes


def test_a_book_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(BOOK)
    character_model().save_pretrained("model")
    character_tokenizer().save_pretrained("model")
    run(monkeypatch, "read_once.py", "read", "book.txt", "book.safetensors", "--model", "model")
    assert "tokens read" in capsys.readouterr().out
    run(monkeypatch, "read_once.py", "continue", "book.safetensors", "The next morning", "--model", "model")
    assert capsys.readouterr().out.startswith("The next morning")


@pytest.mark.slow
@pytest.mark.small_model
@pytest.mark.usefixtures("loaded_once")
def test_policies_are_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "compare_policies.py", "book.txt", "--size", "32", "--tokens", "80")
    _, *lines = capsys.readouterr().out.splitlines()
    found = {line.split()[0]: float(line.split()[2]) for line in lines}
    assert found.keys() == {"window+4", "tova", "echo", "full"}
    assert all(perplexity >= found["full"] > 1 for perplexity in found.values())
