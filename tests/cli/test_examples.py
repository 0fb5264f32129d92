"""Every command in the README, the docs and the help texts can be parsed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from msrnn.cli import app

README = Path(__file__).parents[2] / "README.md"


def verbs(command: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every verb by its words, as ("eval", "story")."""
    if not hasattr(command, "commands"):
        yield names, command
        return
    for name, inner in command.commands.items():
        yield from verbs(inner, *names, name)


VERBS = dict(verbs(typer.main.get_command(app)))


def commands(lines: Iterable[str]) -> list[str]:
    """The commands in these lines, without a pipe before `msrnn` and without a comment."""
    found = (re.search(r"(?:^|\| )(msrnn .*?)(?: +#.*)?$", line.strip()) for line in lines)
    return [command[1] for command in found if command]


SHOWN = commands(README.read_text().partition("## The command line")[2].split("```")[1].splitlines())
PAGES = (page.read_text().splitlines() for page in README.parent.glob("docs/*.md"))
DOCUMENTED = commands(line for lines in PAGES for line in lines if line.startswith("msrnn "))
HELPED = commands(line for verb in VERBS.values() for line in verb.epilog.splitlines())


def parsed(command: str) -> dict[str, Any]:
    """The values of a verb's parameters; the verb does not run."""
    _, *words = shlex.split(command)
    name = tuple(words[: 2 if words[0] == "eval" else 1])
    values: dict[str, Any] = VERBS[name].make_context(" ".join(name), words[len(name) :]).params
    return values


@pytest.mark.parametrize("command", dict.fromkeys([*SHOWN, *DOCUMENTED, *HELPED]))
def test_examples_parse(command: str) -> None:
    assert parsed(command) is not None


def test_readme_shows_every_verb() -> None:
    assert {command.split()[1] for command in SHOWN} == {name[0] for name in VERBS}


@pytest.mark.parametrize("words", ["generate hello --sise 8", "eval story --stories many", "read book.txt"])
def test_examples_that_would_not_parse(words: str) -> None:
    with pytest.raises(typer.TyperException):
        parsed(f"msrnn {words}")
