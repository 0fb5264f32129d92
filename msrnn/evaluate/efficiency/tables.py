"""The rows of the efficiency table as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.filesize import decimal

from msrnn.evaluate.efficiency.bench import Row
from msrnn.evaluate.tables import MISSING, markdown_list, markdown_table


def headers(rows: Sequence[Row]) -> list[str]:
    equal = next((row.equal_batch for row in rows if row.equal_batch), None)
    return [
        "contender",
        "bytes of a state",
        "largest batch",
        "ms/step",
        "tokens/s",
        "relative",
        "over floor",
        f"tokens/s at batch {equal or MISSING}",
        "ms/step at batch 1",
        "prefill ms",
        "tokens/s, whole sequences",
        "relative, whole sequences",
    ]


def lines(rows: Sequence[Row]) -> list[list[str]]:
    """Cells as they are shown. What is relative is so to the first row: the full model at its own largest batch."""
    full = rows[0]
    return [
        [
            row.label,
            decimal(row.nbytes),
            _number(row.batch),
            _number(row.ms, 2),
            _number(row.throughput),
            _ratio(row.throughput, full.throughput),
            _number(row.over_floor, 2),
            _number(row.equal_throughput),
            _number(row.one_ms, 2),
            _number(row.prefill_ms),
            _number(row.whole),
            _ratio(row.whole, full.whole),
        ]
        for row in rows
    ]


def _number(value: float | None, digits: int = 0) -> str:
    return MISSING if value is None else f"{value:,.{digits}f}"


def _ratio(value: float | None, base: float | None) -> str:
    return f"{value / base:.2f}" if value and base else MISSING


def markdown(rows: Sequence[Row], setting: dict[str, str]) -> str:
    """The table, and below it what it was measured with."""
    return f"{markdown_table(headers(rows), lines(rows))}\n{markdown_list(setting)}"
