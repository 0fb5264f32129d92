from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

import pytest
import typer
from typer import Argument, Option
from typer.testing import CliRunner

from msrnn.backends import BACKENDS
from msrnn.cli import app
from msrnn.cli.model_options import GivenOptions
from msrnn.cli.options import register

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Colours:
    ink: Annotated[str, Option(help="Ink.")] = "black"
    paper: Annotated[int | None, Option("--paper", help="Paper.")] = None


def test_a_group_of_options_reaches_the_verb_as_one_value() -> None:
    calls: list[Any] = []

    def draw(name: Annotated[str, Argument()], *, twice: bool = False, colours: Colours) -> None:
        """Draw.

        Examples:
            draw x --ink red
        """
        calls.append((name, twice, colours))

    def erase() -> None:
        """Erase."""

    verbs = typer.Typer()
    draw.__annotations__ |= {"colours": Colours, "name": Annotated[str, Argument()]}  # they are local to this test
    register(verbs, draw, erase)
    assert CliRunner().invoke(verbs, ["draw", "x", "--ink", "red", "--twice"]).exit_code == 0
    assert CliRunner().invoke(verbs, ["draw", "y", "--paper", "3"]).exit_code == 0
    assert CliRunner().invoke(verbs, ["draw", "y", "--paper", "three"]).exit_code == 2
    assert calls == [("x", True, Colours("red")), ("y", False, Colours(paper=3))]


@pytest.mark.parametrize("verb", ["generate", "chat", "read"])
def test_verbs_with_a_state_have_the_same_model_options(verb: str) -> None:
    names = {parameter.name for parameter in COMMANDS[verb].params}
    assert {field.name for field in fields(GivenOptions)} <= names
    assert {"policy", "size", "positions", "state_dtype", "backend"} <= names
    (backend,) = (parameter for parameter in COMMANDS[verb].params if parameter.name == "backend")
    assert all(name in backend.help for name in BACKENDS)


@pytest.mark.parametrize(
    ("verb", "name", "other"),
    [
        *[(verb, "--state", "--load") for verb in ("generate", "chat", "read")],
        *[(verb, "--max-new-tokens", "--max-tokens") for verb in ("generate", "chat")],
        ("serve", "--served-model-name", "--name"),
    ],
)
def test_options_with_two_names(verb: str, name: str, other: str) -> None:
    """Verbs share the first; the second is that of another tool, or an earlier one."""
    assert [name, other] in [parameter.opts for parameter in COMMANDS[verb].params]


@pytest.mark.parametrize("verb", ["demo", "generate", "chat", "read", "serve", "analyze", "explore"])
def test_every_option_has_a_help_text_and_a_default(verb: str) -> None:
    for parameter in COMMANDS[verb].params:
        if parameter.name != "help":
            assert parameter.help, parameter.name
            has_default = parameter.required or parameter.show_default or parameter.default is not None
            assert has_default, parameter.name
