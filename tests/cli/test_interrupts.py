"""Ctrl-C and crashes: a read resumes from its checkpoint, and an interrupted answer is saved."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from msrnn.cli.answer_streamer import AnswerStreamer
from msrnn.core.state_file import load_description, load_tensors
from msrnn.hf import long_read
from msrnn.hf.wavefront import read_columns
from tests.helpers.command import TEXT, Run, same

BOOK = TEXT * 8  # more than four blocks
SIZE = ("--size", 16)
TOKENS = 1 + len(BOOK)


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    """Handle Ctrl-C, which is ignored if the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def book(tmp_path: Path) -> Path:
    (tmp_path / "book.txt").write_text(BOOK)
    return tmp_path / "book.txt"


Stop = Callable[[int, Callable[[], Any]], None]


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Stop:
    """`stop(3, how)`: something happens while the third block passes through the model, once."""

    def stop(block: int, how: Callable[[], Any]) -> None:
        count = 0

        def stopped(*args: Any) -> Any:
            nonlocal count
            count += 1
            if count == block:
                how()
            return read_columns(*args)

        monkeypatch.setattr("msrnn.hf.block_reader.read_columns", stopped)

    return stop


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def twice() -> None:
    ctrl_c()
    ctrl_c()


def crash() -> None:
    raise RuntimeError("power cut")


def test_ctrl_c_and_the_same_command_again(run: Run, book: Path, tmp_path: Path, stop: Stop) -> None:
    state, partial = tmp_path / "state", tmp_path / "state.partial"
    words = ("read", book, "--save", state, *SIZE)
    stop(3, ctrl_c)
    code, out, err = run(*words)
    assert (code, out) == (130, "")
    assert f"stopped after 1,536 of {TOKENS:,} tokens; run the same command to continue from there ({partial})" in err
    assert partial.is_file()
    assert not state.exists()

    code, out, err = run(*words)
    assert code == 0
    assert f"continuing after 1,536 of {TOKENS:,} tokens" in err
    assert f"{TOKENS:,} tokens read" in out
    assert not partial.exists()
    assert run("read", book, "--save", tmp_path / "at once", *SIZE).code == 0
    assert same(state, tmp_path / "at once")


def test_a_crash_goes_on_from_the_last_checkpoint(
    run: Run, book: Path, tmp_path: Path, stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_read, "SECONDS", 0.0)
    monkeypatch.setattr(long_read, "SHARE", 0)
    words = ("read", book, "--save", tmp_path / "state", *SIZE)
    stop(4, crash)
    with pytest.raises(RuntimeError, match="power cut"):
        run(*words)
    assert load_description(tmp_path / "state.partial")["notes"]["read"] == 1536
    assert f"continuing after 1,536 of {TOKENS:,} tokens" in run(*words).err
    assert run("read", book, "--save", tmp_path / "at once", *SIZE).code == 0
    assert same(tmp_path / "state", tmp_path / "at once")


def test_ctrl_c_twice_stops_inside_a_block(
    run: Run, book: Path, tmp_path: Path, stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("read", book, "--save", tmp_path / "state", *SIZE)
    stop(3, twice)
    code, _, err = run(*words)
    assert code == 130
    assert "stopped; the state was not saved" in err
    assert list(tmp_path.iterdir()) == [book]
    monkeypatch.setattr(long_read, "SECONDS", 0.0)
    stop(3, twice)
    code, _, err = run(*words)
    assert code == 130
    assert "run the same command to continue from the last checkpoint" in err
    assert "continuing after" in run(*words).err


def stopped_at(words: tuple[object, ...], run: Run, stop: Stop) -> None:
    stop(2, ctrl_c)
    assert run(*words).code == 130


OTHER = {
    "another text": ((), TEXT[::-1] * 8, "it is of another text"),
    "another size": (("--size", 12), BOOK, "was saved with size 16, and this model has size 12: use"),
    "another policy": (("--policy", "window"), BOOK, "with policy 'tova'"),
    "other positions": (("--positions", "compact"), BOOK, "with positions 'original'"),
    "fewer tokens": (("--tokens", 100), BOOK, "it has read 1,024 tokens, more than the 100 to read"),
}


@pytest.mark.parametrize("name", OTHER)
def test_a_checkpoint_of_something_else(name: str, run: Run, book: Path, tmp_path: Path, stop: Stop) -> None:
    how, text, reason = OTHER[name]
    options = (*SIZE, "--positions", "original")
    words = ("read", book, "--save", tmp_path / "state", *options)
    stopped_at(words, run, stop)
    book.write_text(text)
    before = (tmp_path / "state.partial").read_bytes()
    code, out, err = run(*words, *how)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{tmp_path / 'state.partial'}: a checkpoint that does not fit this command (" in err
    assert reason in err
    assert "add --force to start from the beginning" in err
    assert (tmp_path / "state.partial").read_bytes() == before
    code, out, err = run(*words, *how, "--force")
    assert (code, "starts from the beginning" in err) == (0, True)
    assert run("read", book, "--save", tmp_path / "fresh", *options, *how).code == 0
    assert same(tmp_path / "state", tmp_path / "fresh")
    assert not (tmp_path / "state.partial").exists()


def test_more_tokens_and_a_longer_text_go_on(run: Run, book: Path, tmp_path: Path, stop: Stop) -> None:
    """A checkpoint fits every text that begins with the tokens it has read."""
    stopped_at(("read", book, "--save", tmp_path / "state", *SIZE, "--tokens", 2000), run, stop)
    book.write_text(BOOK + "and more")
    code, out, err = run("read", book, "--save", tmp_path / "state", *SIZE)
    assert code == 0, err
    assert f"continuing after 1,024 of {TOKENS + 8:,} tokens" in err
    assert f"{TOKENS + 8:,} tokens read" in out


def test_force_goes_on_where_the_checkpoint_fits(run: Run, book: Path, tmp_path: Path, stop: Stop) -> None:
    (tmp_path / "state").write_text("old")
    words = ("read", book, "--save", tmp_path / "state", "--force", *SIZE)
    stopped_at(words, run, stop)
    assert (tmp_path / "state").read_text() == "old"
    assert "continuing after 1,024" in run(*words).err


def test_checkpoints_know_the_state_they_began_from(run: Run, book: Path, tmp_path: Path, stop: Stop) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for path, text in ((one, "once"), (two, "twice")):
        assert run("read", "-", "--save", path, *SIZE, stdin=text).code == 0
    words = ("read", book, "--save", tmp_path / "state")
    stopped_at((*words, "--load", one), run, stop)
    for more in (("--load", two), SIZE):
        assert "it began from another state" in run(*words, *more).err
    assert f"continuing after 1,024 of {TOKENS - 1:,}" in run(*words, "--load", one).err
    assert run("read", book, "--save", tmp_path / "fresh", "--load", one).code == 0
    assert same(tmp_path / "state", tmp_path / "fresh")


@pytest.mark.parametrize("notes", [None, [], {"read": True}, {"read": -5}, {"read": 10**9}, {"read": 1024}])
def test_forged_checkpoints(notes: object, run: Run, book: Path, tmp_path: Path, stop: Stop) -> None:
    words = ("read", book, "--save", tmp_path / "state", *SIZE)
    stopped_at(words, run, stop)
    partial = tmp_path / "state.partial"
    tensors, description = load_tensors(partial)
    save_file(
        {n: t.clone() for n, t in tensors.items()},
        tmp_path / "x",
        {"msrnn": json.dumps({**description, "notes": notes})},
    )
    (tmp_path / "x").replace(partial)
    code, out, err = run(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "does not fit this command" in err


def test_tokens(run: Run, book: Path, tmp_path: Path) -> None:
    code, out, _ = run("read", book, "--save", tmp_path / "state", *SIZE, "--tokens", 100)
    assert code == 0
    assert "100 tokens read" in out
    assert f"--tokens 100 leaves {TOKENS - 100:,} tokens of the text unread" in out
    assert run("read", "-", "--save", tmp_path / "same", *SIZE, stdin=BOOK[:99]).code == 0
    assert same(tmp_path / "state", tmp_path / "same")
    code, out, _ = run("read", book, "--save", tmp_path / "all", *SIZE, "--tokens", 10**9)
    assert (code, "unread" in out) == (0, False)


@pytest.fixture
def three_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after the third token of an answer."""
    put = AnswerStreamer.put

    def interrupted(self: AnswerStreamer, value: Any) -> None:
        put(self, value)
        if len(self.ids) == 3:
            ctrl_c()

    monkeypatch.setattr(AnswerStreamer, "put", interrupted)


@pytest.mark.usefixtures("three_tokens")
def test_a_stopped_answer_that_is_not_saved(run: Run) -> None:
    code, out, err = run("generate", TEXT, *SIZE)
    assert (code, bool(out.strip())) == (130, True)
    assert "stopped after 3 tokens" in err
    assert "the state is not saved, --save FILE saves it" in err


@pytest.mark.usefixtures("three_tokens")
def test_a_stopped_answer_is_kept(run: Run, tmp_path: Path) -> None:
    code, out, err = run("generate", TEXT, *SIZE, "--save", tmp_path / "told")
    assert code == 130
    assert "stopped after 3 tokens" in err
    assert f"{tmp_path / 'told'}: {1 + len(TEXT) + 3} tokens read" in err
    said = out.removesuffix("\n")
    assert run("read", "-", "--save", tmp_path / "read", *SIZE, stdin=TEXT + said).code == 0
    assert same(tmp_path / "told", tmp_path / "read")


@pytest.mark.usefixtures("three_tokens")
def test_a_stopped_answer_stays_in_the_conversation(run: Run) -> None:
    code, out, err = run("chat", *SIZE, stdin="hello\n/state\nand you?\n")
    assert code == 0
    assert err.count("stopped; the answer so far stays in the conversation") == 2
    assert out.count("tokens read") == 1


def test_a_prompt_that_was_not_read_is_not_kept(run: Run, tmp_path: Path, stop: Stop) -> None:
    stop(2, ctrl_c)
    code, out, err = run("generate", BOOK, *SIZE, "--save", tmp_path / "told")
    assert (code, out.strip()) == (130, "")
    assert "stopped before the prompt was read; nothing is saved" in err
    assert list(tmp_path.iterdir()) == []
