from __future__ import annotations

import io
import sys

import pytest

from msrnn.core.notes import loading, note, showing

CLEAR = "\r\033[K"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_note_is_a_line_without_markup(capsys: pytest.CaptureFixture[str]) -> None:
    note("[bold]a file[/bold]")
    assert capsys.readouterr() == ("", "[bold]a file[/bold]\n")


def test_a_line_while_something_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with loading("a model") as remark:
        assert terminal.getvalue() == f"{CLEAR}loading a model …"
        remark("it is large")
        assert terminal.getvalue() == f"{CLEAR}loading a model …{CLEAR}it is large\n"
    assert terminal.getvalue().endswith(f"it is large\n{CLEAR}")


def test_a_line_takes_the_place_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with showing() as show:
        show("1 of 2")
        show("2 of 2")
    assert terminal.getvalue() == f"{CLEAR}1 of 2{CLEAR}2 of 2{CLEAR}"


def test_the_line_is_cleared_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(ValueError, match="broken"), loading("a model"):
        raise ValueError("broken")
    assert terminal.getvalue() == f"{CLEAR}loading a model …{CLEAR}"


def test_no_line_where_no_one_watches(capsys: pytest.CaptureFixture[str]) -> None:
    with loading("a model") as remark:
        remark("it is large")
    assert capsys.readouterr().err == "it is large\n"
