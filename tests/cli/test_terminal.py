"""What a terminal shows: line editing, lines of earlier conversations, a remark while a model loads, and tables."""

from __future__ import annotations

import os
import pty
import select
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from msrnn.cli.terminal import show_table
from tests.helpers.command import Run, same

PROGRAM = [sys.executable, "-c", "import sys; from msrnn.cli import main; sys.exit(main())"]
UP, HOME = "\x1b[A", "\x01"


class Terminal:
    """A program whose standard streams are a pseudo-terminal."""

    def __init__(self, *words: object, **env: str) -> None:
        self.ours, theirs = pty.openpty()
        self.shown = self.unread = ""
        self.process = subprocess.Popen(
            [*PROGRAM, *map(str, words)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", **env},
            start_new_session=True,
        )
        os.close(theirs)

    def wait_for(self, text: str, seconds: float = 120) -> None:
        """Read the output until it contains the text; what follows is for the next one who waits."""
        until = time.monotonic() + seconds
        while text not in self.unread:
            assert self._read(until), f"no {text!r} in {self.shown}"
        self.unread = self.unread.split(text, 1)[1]

    def _read(self, until: float) -> bool:
        """Whether there was more output."""
        ready, _, _ = select.select([self.ours], [], [], max(0, until - time.monotonic()))
        try:
            data = os.read(self.ours, 1024).decode(errors="replace") if ready else ""
        except OSError:  # it has ended
            data = ""
        self.shown += data
        self.unread += data
        return bool(data)

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def end(self) -> int:
        until = time.monotonic() + 60
        while self._read(until):
            pass
        return self.process.wait(60)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home" / "msrnn").mkdir(parents=True)
    return tmp_path / "home"


def test_lines_are_edited_and_remembered(home: Path, folder: Path, run: Run, tmp_path: Path) -> None:
    pytest.importorskip("readline")
    remembered = home / "msrnn" / "chat_history"
    remembered.write_text("an earlier line\n")
    words = ("chat", "--size", 16, "--max-new-tokens", 4, "--save", tmp_path / "talk")
    terminal = Terminal(*words, "--model", folder, XDG_STATE_HOME=str(home))
    try:
        terminal.wait_for("> ")
        terminal.type(f"{UP}\r")
        terminal.wait_for("cut at --max-new-tokens 4")
        terminal.wait_for("> ")
        terminal.type(f"ello{HOME}h\r")
        terminal.wait_for("cut at --max-new-tokens 4")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.end() == 0, terminal.shown
    finally:
        terminal.process.kill()
    assert f"loading {folder} …" in terminal.shown
    assert remembered.read_text().splitlines() == [
        "an earlier line",
        "hello",
    ]  # a repeated line is kept once
    assert stat.S_IMODE(remembered.stat().st_mode) == 0o600
    assert os.listdir(home / "msrnn") == ["chat_history"]
    plain = (*words[:-1], tmp_path / "plain")
    assert run(*plain, stdin="an earlier line\nhello\n").code == 0
    assert same(tmp_path / "talk", tmp_path / "plain")


def test_nothing_of_it_where_there_is_no_terminal(home: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    code, _, err = run("chat", "--size", 16, "--max-new-tokens", 4, stdin="hello\n")
    assert code == 0
    assert "loading" not in err
    assert "\033" not in err
    assert os.listdir(home / "msrnn") == []


LABELS = ("echo+1~64@compressed:lnln", "tova@original", "[tova]")
VALUES = [f"{12345.67 + i:,.2f}\n{12000 + i:,}–{13000 + i:,}" for i in range(7)]  # noqa: RUF001


@pytest.mark.parametrize(("width", "parts"), [(45, 7), (60, 7), (61, 4), (80, 3), (141, 1)])
def test_tables_are_in_parts_that_fit(
    width: int, parts: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    names = ["policy@positions", *(f"{1000 * i:,}" for i in range(7))]
    show_table("perplexity", names, [[label, *VALUES] for label in LABELS])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    assert {word: out.count(word) for word in LABELS} == dict.fromkeys(LABELS, parts)
    lines = [line for value in VALUES for line in value.split("\n")]
    assert {line: out.count(line) for line in lines} == dict.fromkeys(lines, len(LABELS))
    assert (out.count("perplexity"), "…" in out) == (1, False)


def test_titles_break_between_words(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    path = "/a/folder/with-a-name/that-is-longer/than-the-terminal/is-wide"
    title = f"perplexity of {path}, a text of many words, 12 chunks of 4,096 tokens"
    show_table(title, ["policy", "8"], [["tova", "1.00"]])
    out = capsys.readouterr().out
    assert set(title.split()) <= set(out.split())
    assert all(len(line) <= 40 or path in line for line in out.splitlines())


def test_what_fits_nowhere_is_folded(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    show_table("", ["policy", "512", "1,024"], [["a" * 40, "b" * 20, "c"]])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 30
    assert [out.count(letter) for letter in "abc…"] == [2 * 40, 20, 3, 0]  # two parts, and in each the c of policy
