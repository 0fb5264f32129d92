"""The command line: one file per verb; `eval_story.py` is `msrnn eval story`.

`main` prints bad input as one line; any other error keeps its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any

import typer

from msrnn import __version__
from msrnn.cli.analyze import analyze
from msrnn.cli.bench import bench
from msrnn.cli.budget import budget
from msrnn.cli.chat import chat
from msrnn.cli.demo import demo
from msrnn.cli.download import download
from msrnn.cli.eval_chat_memory import chat_memory
from msrnn.cli.eval_extrapolation import extrapolation
from msrnn.cli.eval_perplexity import perplexity
from msrnn.cli.eval_reasoning import reasoning
from msrnn.cli.eval_retrieval import retrieval
from msrnn.cli.eval_story import story
from msrnn.cli.eval_understanding import qasper, squality, verb
from msrnn.cli.explore import explore
from msrnn.cli.generate import generate
from msrnn.cli.judge import judge
from msrnn.cli.options import as_typed, register, with_cluster
from msrnn.cli.policies import policies
from msrnn.cli.processes import SHARED_VERBS, print_error, speaking_once
from msrnn.cli.read import read
from msrnn.cli.serve import serve
from msrnn.cli.terminal import Stopped, quiet_torchao
from msrnn.cli.train_weights import train_weights
from msrnn.core.torchrun import is_first, is_torchrun
from msrnn.errors import ABSENT, UsageError, show

BAD_INPUT, INTERRUPTED = 2, 130
_EXPECTED = {"int_parsing": "must be a whole number", "float_parsing": "must be a number"}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

evaluations = typer.Typer(name="eval", no_args_is_help=True)

register(app, demo, download, generate, chat, read, serve, policies, budget, train_weights, bench, analyze, explore)
register(evaluations, perplexity, extrapolation, verb(squality), verb(qasper), retrieval, reasoning, chat_memory, story)
app.add_typer(evaluations)
register(app, judge)


@evaluations.callback()
def _evaluations() -> None:
    """The paper's evaluations, on any model: what eviction costs. Each resumes where it was interrupted."""


def _version(requested: bool) -> None:
    if requested:
        print(f"msrnn {__version__}")
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run any Hugging Face decoder as an exact, bounded multi-state RNN: constant memory and time per token."""


@cache
def _command() -> Any:
    """All verbs with their options, built once: that takes longer than parsing them."""
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code: 2 for bad input, 130 after Ctrl-C."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if is_torchrun() and words[:1] and words[0] not in SHARED_VERBS:
        known = f"{', '.join(SHARED_VERBS[:-1])} and {SHARED_VERBS[-1]}"
        return _print_error(f"torchrun: {words[0]} works in one process; {known} in several")
    quiet_torchao()
    try:
        with speaking_once():
            code = _command()(with_cluster(words), prog_name="msrnn", standalone_mode=False)
    except Stopped as stopped:
        if is_first():
            print(f"\nmsrnn: {stopped}", file=sys.stderr)
        return INTERRUPTED
    except typer.TyperException as error:
        return _print_error(_with_value(error))
    except OSError as error:
        return _print_error(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except UsageError as error:
        return _print_error(_with_flag(error, words))
    except (RuntimeError, MemoryError) as error:
        from msrnn.core.device_memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        return _print_error("out of memory; use a smaller --size, or a smaller --batch if the command has it")
    if code == INTERRUPTED and is_first():
        print(file=sys.stderr)
    return code if isinstance(code, int) else 0


def _with_value(error: typer.TyperException) -> str:
    """The message of the parser; about a value that it cannot read, in the same form as ours."""
    problems: list[Any] = getattr(error.__cause__, "errors", list)()
    if not problems:
        return error.format_message()
    value, message = str(problems[0]["input"]), problems[0]["msg"].removeprefix("Value error, ").rstrip(".")
    expected = _EXPECTED.get(problems[0]["type"], message)
    flag = _join_spellings(error.param.opts)  # type: ignore[attr-defined]
    return f"{flag} {value[:60] or repr(value)}: {expected}"


def _with_flag(error: UsageError, words: Sequence[str]) -> str:
    """The library names an argument (`size=0: …`); name the verb's option of this name instead (`--size 0: …`)."""
    name = f"--{(error.name or '').replace('_', '-')}"
    spellings = next((found for found in _options_of(words) if name in found), None)
    if spellings is None and not any(word == name or word.startswith(f"{name}=") for word in words):
        return str(error)
    flag = _join_spellings(spellings or [name])
    if error.value is ABSENT:
        return f"{flag}: {error.problem}"
    return f"{flag} {_as_word(error.value)}: {error.problem}"


def _as_word(value: Any) -> str:
    """A value as a user types it; text without a visible word is quoted."""
    if isinstance(value, str):
        return value if value.isprintable() and value.strip() else show(value)
    return as_typed(value) if isinstance(value, float) else show(value)


def _join_spellings(spellings: Sequence[str]) -> str:
    """An option with its other spellings: `--max-new-tokens (--max-tokens)`."""
    first, *others = spellings
    return f"{first} ({', '.join(others)})" if others else first


def _options_of(words: Sequence[str]) -> list[list[str]]:
    """The options of the verb that these words call, each with all its spellings."""
    command = _command()
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    return [parameter.opts for parameter in command.params]


def _print_error(message: str) -> int:
    if message:
        print_error(message)
    return BAD_INPUT
