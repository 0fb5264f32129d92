"""A verb's docstring is its help, and what stands under Examples ends it."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import typer


def register(app: typer.Typer, *verbs: Callable[..., None]) -> None:
    for verb in verbs:
        about, _, examples = (inspect.getdoc(verb) or "").partition("\n\nExamples:\n")
        about = "\n\n".join(" ".join(paragraph.split()) for paragraph in about.split("\n\n"))
        lines = [line.strip() for line in examples.splitlines() if line.strip()]
        app.command(help=about, epilog="\n\n".join(["Examples:", *lines]))(verb)
