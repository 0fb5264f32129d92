"""Tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

MISSING = "—"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column is of names, the others are of numbers."""
    shown = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in shown)


def markdown_list(setting: dict[str, str]) -> str:
    """What is empty is not there."""
    return "".join(f"- {name}: {value}\n" for name, value in setting.items() if value != "")
