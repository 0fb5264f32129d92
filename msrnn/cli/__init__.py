"""The command line: one thin file per verb, and one place where what went wrong becomes one line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from msrnn.cli.analyze import analyze
from msrnn.cli.bench import bench
from msrnn.cli.chat import chat
from msrnn.cli.demo import demo
from msrnn.cli.eval import app as evaluations
from msrnn.cli.explore import explore
from msrnn.cli.generate import generate
from msrnn.cli.judge import judge
from msrnn.cli.policies import policies
from msrnn.cli.read import read
from msrnn.cli.terminal import Stopped
from msrnn.cli.verbs import register
from msrnn.errors import UsageError
from msrnn.version import __version__

BAD_INPUT, INTERRUPTED = 2, 130

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

register(app, demo, generate, chat, read, policies, bench, analyze, explore)
app.add_typer(evaluations)
register(app, judge)


def _version(asked: bool) -> None:
    if asked:
        print(f"msrnn {__version__}")
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Any Hugging Face decoder as an exact, bounded multi-state RNN: constant memory and time per token."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code. Bad input is one line that names the value and the mend, with code 2."""
    try:
        code = app(arguments, prog_name="msrnn", standalone_mode=False)
    except Stopped as stopped:
        print(f"\nmsrnn: {stopped}", file=sys.stderr)
        return INTERRUPTED
    except typer.TyperException as error:
        return _complain(error.format_message())
    except OSError as error:
        return _complain(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except UsageError as error:
        return _complain(str(error))
    except (RuntimeError, MemoryError) as error:
        from msrnn.evaluation.batch_size import out_of_memory

        if not out_of_memory(error):
            raise
        return _complain("out of memory; take a smaller --size, or a smaller --batch where there is one")
    if code == INTERRUPTED:
        print(file=sys.stderr)
    return code if isinstance(code, int) else 0


def _complain(message: str) -> int:
    if message:
        print("msrnn:", " ".join(message.split()), file=sys.stderr)
    return BAD_INPUT
