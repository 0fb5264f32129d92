"""Every figure as one line of JSON, written as soon as it is measured and found again by a later run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msrnn.files import write_atomically

Row = dict[str, Any]


class Ledger:
    """Cells of one setting. What was measured in the same setting is not measured again; what did not fit is."""

    def __init__(self, path: Path | None, setting: Row) -> None:
        self.path, self.setting = path, setting
        self.rows = read_rows(path) if path and path.exists() else []

    def cell(self, key: Row, unit: str, measure: Callable[[], float | None]) -> float | None:
        """The value of a cell; None: it did not fit into memory."""
        whole = {**key, **self.setting}
        for row in reversed(self.rows):
            if row.get("value") is not None and {**row, **whole} == row:
                return float(row["value"])
        value = measure()
        self._append({**key, "value": value, "unit": unit, **self.setting})
        return value

    def _append(self, row: Row) -> None:
        self.rows.append(row)
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def _rewrite(path: Path, text: str) -> None:
    def write(to: Path) -> None:
        to.write_text(text)

    write_atomically(path, write)


def read_rows(path: Path) -> list[Row]:
    """All whole lines. A last line that an interruption cut off is taken out of the file."""
    lines = path.read_text().splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        _rewrite(path, "".join(lines[:-1]))
        lines.pop()
    try:
        rows = [json.loads(line) for line in lines]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not rows that msrnn wrote ({error.msg}); use --force to start anew") from error
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: not rows that msrnn wrote; use --force to start anew")
    return rows
