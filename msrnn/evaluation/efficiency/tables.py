"""The rows of the efficiency table as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.filesize import decimal

from msrnn.evaluation.efficiency.bench import Row
from msrnn.evaluation.efficiency.timing import Times
from msrnn.evaluation.tables import MISSING, markdown_list, markdown_table

MARK = " !"


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


def lines(rows: Sequence[Row], between: str = "\n") -> list[list[str]]:
    """Cells as they are shown: a time is the median of its runs, and their range.

    Relative means to the first row, the full model at its own largest batch.
    """
    full = rows[0]
    return [
        [
            row.label,
            decimal(row.nbytes),
            _number(row.batch),
            _times(row.ms, 2, between),
            _number(row.throughput),
            _ratio(row.throughput, full.throughput),
            _number(row.over_floor, 2) + (MARK if row.impossible else ""),
            _number(row.equal_throughput),
            _times(row.one_ms, 2, between),
            _times(row.prefill_ms, 0, between),
            _number(row.whole),
            _ratio(row.whole, full.whole),
        ]
        for row in rows
    ]


def remarks(rows: Sequence[Row]) -> list[str]:
    """What a reader must know of these times."""
    found = ["Times are medians, with the fastest and the slowest run."]
    if any(row.impossible for row in rows):
        found.append(
            f"{MARK.strip()} below the floor, which cannot be: something else used this machine while the step or its "
            "floor was measured. Measure it again on an idle machine, with --force."
        )
    if unsteady := [row.label for row in rows if row.unsteady]:
        found.append(
            f"Runs of {', '.join(unsteady)} still differ by more than a tenth after three rounds: the machine is busy."
        )
    return found


def _times(times: Times | None, digits: int, between: str) -> str:
    if times is None:
        return MISSING
    low, high = (f"{value:,.{digits}f}" for value in (times.low, times.high))
    middle = _number(times.median, digits)
    return middle if low == high == middle else f"{middle}{between}{low}–{high}"  # noqa: RUF001


def _number(value: float | None, digits: int = 0) -> str:
    return MISSING if value is None else f"{value:,.{digits}f}"


def _ratio(value: float | None, base: float | None) -> str:
    return f"{value / base:.2f}" if value and base else MISSING


def markdown(rows: Sequence[Row], setting: dict[str, str]) -> str:
    """The table, and below it what it was measured with."""
    about = "".join(f"{remark}\n\n" for remark in remarks(rows))
    return f"{markdown_table(headers(rows), lines(rows, ' · '))}\n{about}{markdown_list(setting)}"
