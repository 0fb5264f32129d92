"""`msrnn eval`: one thin file per evaluation."""

from __future__ import annotations

import typer

from msrnn.cli.eval.extrapolation import extrapolation
from msrnn.cli.eval.perplexity import perplexity
from msrnn.cli.eval.story import story
from msrnn.cli.eval.understanding import qasper, squality, verb
from msrnn.cli.options import register

app = typer.Typer(name="eval", no_args_is_help=True)
register(app, perplexity, extrapolation, verb(squality), verb(qasper), story)


@app.callback()
def _app() -> None:
    """The paper's evaluations, on any model: what eviction costs. Each resumes where it was interrupted."""
