"""Every command in the README, the docs and the help texts can be parsed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from msrnn.cli import app
from msrnn.cli.options import with_cluster

ROOT = Path(__file__).parents[2]


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


PAGES = {page: page.read_text() for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))}
FENCED = {page: re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) for page, text in PAGES.items()}
SHOWN = commands(FENCED[ROOT / "docs" / "command-line.md"][0].splitlines())
DOCUMENTED = commands(line for blocks in FENCED.values() for block in blocks for line in block.splitlines())
HELPED = commands(line for verb in VERBS.values() for line in verb.epilog.splitlines())


def parsed(command: str) -> dict[str, Any]:
    """The values of a verb's parameters; the verb does not run."""
    _, *words = shlex.split(command)
    name = tuple(words[: 2 if words[0] == "eval" else 1])
    given = with_cluster(words[len(name) :])
    values: dict[str, Any] = VERBS[name].make_context(" ".join(name), given).params
    return values


@pytest.mark.parametrize("command", dict.fromkeys([*SHOWN, *DOCUMENTED, *HELPED]))
def test_examples_parse(command: str) -> None:
    assert parsed(command) is not None


def test_the_command_line_page_shows_every_verb() -> None:
    shown = {tuple(command.split()[1:3]) for command in SHOWN}
    assert {words if words[0] == "eval" else words[:1] for words in shown} == set(VERBS)


@pytest.mark.parametrize("words", ["generate hello --sise 8", "eval story --stories many", "read book.txt"])
def test_examples_that_would_not_parse(words: str) -> None:
    with pytest.raises(typer.TyperException):
        parsed(f"msrnn {words}")


def test_requests_that_are_shown_say_their_temperature() -> None:
    """The small default model states none, and writes nonsense at temperature 1."""
    helped = VERBS["serve",].help
    bodies = re.findall(r"curl \S+/completions -d '(.*?)'", "\n".join([*PAGES.values(), helped]), re.DOTALL)
    assert len(bodies) == 3
    assert all("temperature" in json.loads(body) for body in bodies)


def test_no_example_asks_a_bounded_state_for_a_detail() -> None:
    """Most details are evicted (docs/results/retrieval.md): examples continue a state, chat, or recall."""
    asking = [command for command in [*DOCUMENTED, *HELPED] if "--state" in command and "?" in command]
    assert [command for command in asking if "--recall" not in command] == []
