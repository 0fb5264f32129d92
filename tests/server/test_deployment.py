"""The files in examples/ start the server with options that it has."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from msrnn.cli.serve_options import ServeOptions

EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIONS = {f"--{field.name.replace('_', '-')}" for field in fields(ServeOptions)}


def command(text: str) -> list[str]:
    if found := re.search(r"^ExecStart=(.*)$", text, flags=re.MULTILINE):
        return shlex.split(found[1])
    found = re.search(r"^ENTRYPOINT (\[.*\])$", text, flags=re.MULTILINE)
    assert found is not None
    words: list[str] = json.loads(found[1])
    return words


@pytest.mark.parametrize("name", ["msrnn.service", "Containerfile"])
def test_options(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    program, verb, *rest = command(text)
    assert (Path(program).name, verb) == ("msrnn", "serve")
    assert {word for word in rest if word.startswith("--")} <= OPTIONS
    assert rest[rest.index("--shutdown-timeout") + 1] == "60"
    assert "75" in text  # longer than that
