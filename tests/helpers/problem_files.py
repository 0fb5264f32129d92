"""Tiny files of problems, in the formats of GSM8K and MATH-500."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SUMS = [
    {"question": f"What is {i} + {i}?", "answer": f"It is {i}+{i}=<<{i}+{i}={2 * i}>>{2 * i}.\n#### {2 * i}"}
    for i in (1, 2, 4)
]
HALVES = [{"problem": f"Half of {i}?", "solution": "easy", "answer": rf"\frac{{{i}}}{{2}}", "level": 1} for i in (1, 3)]


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_sums(folder: Path) -> Path:
    return write_lines(folder / "sums.jsonl", SUMS)


def write_halves(folder: Path) -> Path:
    return write_lines(folder / "halves.jsonl", HALVES)
