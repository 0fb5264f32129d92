"""docs/clients.md from clients themselves: `python -m tests.helpers.clients_page PYTHON` writes it.

PYTHON is that of an environment with the clients; `make clients` makes it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.helpers.byte_tokenizer import byte_model
from tests.helpers.tool_templates import tool_tokenizer

ROOT = Path(__file__).parents[2]
PAGE, CHECKS = ROOT / "docs" / "clients.md", Path(__file__).parent / "client_checks.py"
TEMPLATE = "examples/chatml-tools.jinja"
TITLE = f"""# Clients

Clients of OpenAI's API that were tried with `msrnn serve`, on a CPU. `make clients` writes this page. *Small* is the
small default model with `--chat-template {TEMPLATE}`, which knows tools; *tiny* is a random
model of two layers. What such models answer makes no sense: the page shows that requests are understood, and that
answers have the form that a client expects. Calls of tools are `required`, so that the server's constraint writes them.

| client | way | small | tiny |
|---|---|---|---|
"""


class Row(NamedTuple):
    """What became of one way of one client."""

    client: str
    way: str
    found: str


@contextmanager
def served(*options: str) -> Iterator[str]:
    """The address of a server."""
    msrnn = Path(sys.executable).parent / "msrnn"
    words = [str(msrnn), "serve", "--port", "0", "--name", "model", "--size", "256", *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as server:
        try:
            assert server.stdout is not None
            said = []
            for line in server.stdout:
                said.append(line)
                if found := re.search(r"http://[\d.]+:\d+", line):
                    break
            else:
                raise RuntimeError("the server has ended:\n" + "".join(said))
            yield found[0]
        finally:
            server.terminate()


def try_all(python: str, address: str) -> list[Row]:
    words, offline = [python, str(CHECKS), address, "model"], {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    ran = subprocess.run(words, env={**os.environ, **offline}, stdout=subprocess.PIPE, text=True, check=True)
    rows = []
    for line in ran.stdout.splitlines():
        found = json.loads(line)
        rows.append(Row(f"{found['package']} {found['version']}", found["way"], found["found"].replace("|", "\\|")))
        print(*rows[-1], file=sys.stderr, flush=True)
    return rows


def render(small: list[Row], tiny: list[Row]) -> str:
    assert [row[:2] for row in small] == [row[:2] for row in tiny]
    return TITLE + "".join(f"| {' | '.join((*one, two.found))} |\n" for one, two in zip(small, tiny, strict=True))


def main(python: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        byte_model().save_pretrained(folder)
        tool_tokenizer("hermes").save_pretrained(folder)
        with served("--model", folder, "--quiet") as address:
            tiny = try_all(python, address)
    with served("--chat-template", TEMPLATE, "--quiet") as address:
        small = try_all(python, address)
    PAGE.write_text(render(small, tiny))


if __name__ == "__main__":
    main(*sys.argv[1:])
