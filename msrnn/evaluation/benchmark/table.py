"""The table and the figure of the benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from msrnn.evaluation.benchmark.timing import Times, busy_remark
from msrnn.evaluation.report import MISSING, Formatted, Table, markdown_list, save_figure
from msrnn.evaluation.statistics import Estimate

NAME = "efficiency"
MARK = " !"
# Relative throughput of LLaMA-2-7B at each size (Oren et al. 2024); None: the full model.
PAPER: dict[int | None, float] = {256: 8.5, 512: 4.8, 1024: 3.1, 2048: 1.7, None: 1.0}
COLORS = {"step": "#2a6f97", "whole": "#61a5c2", "paper": "#c9a227", "rest": "#c8553d"}


@dataclass(frozen=True)
class Row:
    """The measurements of one contender; None: it did not fit, or was not measured."""

    label: str
    size: int | None
    nbytes: int  # of one sequence's state
    batch: int | None = None  # the largest that fits
    ms: Times | None = None  # of a step at that batch
    floor: float | None = None  # of that step, in milliseconds
    equal_batch: int | None = None
    equal_ms: Times | None = None
    one_ms: Times | None = None  # of a step of one sequence
    prefill_ms: Times | None = None
    whole: float | None = None  # tokens per second over whole sequences, at the largest batch

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Row:
        """From a row of a store, whose JSON has lists instead of times."""
        values: dict[str, Any] = {
            name: Times(*value) if isinstance(value, list) else value for name, value in fields.items()
        }
        return cls(**values)

    @property
    def fields(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, Times) else value for name, value in vars(self).items()}

    @property
    def impossible(self) -> bool:
        """Whether a step took less time than its floor, so that one of the two measurements must be wrong."""
        return self.over_floor is not None and self.over_floor < 1

    @property
    def unsteady(self) -> bool:
        """Whether the runs of a time still differ after repeats."""
        return any(times and not times.steady for times in (self.ms, self.equal_ms, self.one_ms, self.prefill_ms))

    @property
    def throughput(self) -> float | None:
        return _per_second(self.batch, self.ms)

    @property
    def equal_throughput(self) -> float | None:
        return _per_second(self.equal_batch, self.equal_ms)

    @property
    def over_floor(self) -> float | None:
        return self.ms.median / self.floor if self.ms and self.floor else None


def _per_second(batch: int | None, ms: Times | None) -> float | None:
    return 1000 * batch / ms.median if batch and ms else None


def table(rows: Sequence[Row], title: str) -> Table:
    """A time is the median of its runs, and their range. Relative: to the full model at its largest batch."""
    equal = next((row.equal_batch for row in rows if row.equal_batch), None)
    header = [
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
    return Table(NAME, title, "", header, [_values(row, rows[0]) for row in rows])


def _values(row: Row, full: Row) -> list[str | Formatted | None]:
    over_floor = _number(row.over_floor, 2)
    return [
        row.label,
        decimal(row.nbytes),
        _number(row.batch),
        _times(row.ms, 2),
        _number(row.throughput),
        _ratio(row.throughput, full.throughput),
        over_floor and over_floor + (MARK if row.impossible else ""),
        _number(row.equal_throughput),
        _times(row.one_ms, 2),
        _times(row.prefill_ms, 0),
        _number(row.whole),
        _ratio(row.whole, full.whole),
    ]


def remarks(rows: Sequence[Row]) -> list[str]:
    """Remarks on the conditions of these times."""
    lines = ["Times are medians, with the fastest and the slowest run."]
    if any(row.impossible for row in rows):
        lines.append(
            f"{MARK.strip()} below the floor, which is impossible: something else used this machine while the step or "
            "its floor was measured. Measure it again on an idle machine."
        )
    if unsteady := [row.label for row in rows if row.unsteady]:
        lines.append(busy_remark(unsteady))
    return lines


def _times(times: Times | None, digits: int) -> Formatted | None:
    def number(value: float) -> str:
        return f"{value:,.{digits}f}"

    if times is None:
        return None
    same = number(times.low) == number(times.high) == number(times.median)
    estimate = Estimate(times.median) if same else Estimate(times.median, times.low, times.high)
    return Formatted(estimate, number, "–")  # noqa: RUF001


def _number(value: float | None, digits: int = 0) -> str | None:
    return None if value is None else f"{value:,.{digits}f}"


def _ratio(value: float | None, base: float | None) -> str | None:
    quotient = _quotient(value, base)
    return None if quotient is None else f"{quotient:.2f}"


def markdown(rows: Sequence[Row], facts: Mapping[str, Any]) -> str:
    """The table, remarks, and what it was measured with."""
    about = "".join(f"{remark}\n\n" for remark in remarks(rows))
    return f"{table(rows, '').markdown()}\n{about}{markdown_list(facts)}"


def figure(rows: Sequence[Row], folder: Path, title: str) -> None:
    """efficiency.png and .svg: relative throughput next to the paper's, and the time of a step over its floor."""
    with save_figure(folder, NAME, 2, max(9, 1.6 * len(rows) + 4)) as (whole, (left, right)):
        _throughput(left, rows)
        _over_floor(right, rows)
        whole.suptitle(title)


def _throughput(axes: Any, rows: Sequence[Row]) -> None:
    full = rows[0]
    series = {
        "a step, full states": [_quotient(row.throughput, full.throughput) for row in rows],
        "whole sequences": [_quotient(row.whole, full.whole) for row in rows],
        "the paper, LLaMA-2-7B": _paper(rows),
    }
    for i, ((name, values), color) in enumerate(zip(series.items(), ("step", "whole", "paper"), strict=True)):
        places = [n + 0.27 * (i - 1) for n, value in enumerate(values) if value]
        bars = axes.bar(places, [value for value in values if value], 0.25, label=name, color=COLORS[color])
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    axes.set_title("throughput at the largest batch, relative to full")
    axes.legend(frameon=False)
    _names(axes, rows)


def _paper(rows: Sequence[Row]) -> list[float | None]:
    """The paper's throughput, at the first row of each size."""
    sizes = [row.size for row in rows]
    return [PAPER.get(size) if size not in sizes[:i] else None for i, size in enumerate(sizes)]


def _over_floor(axes: Any, rows: Sequence[Row]) -> None:
    measured = [(n, row.floor, row.ms.median) for n, row in enumerate(rows) if row.floor and row.ms]
    places = [n for n, _, _ in measured]
    floors = [floor for _, floor, _ in measured]
    axes.bar(places, floors, 0.5, label="floor", color=COLORS["step"])
    rest = [max(0.0, ms - floor) for _, floor, ms in measured]
    bars = axes.bar(places, rest, 0.5, bottom=floors, label="over the floor, and the ratio", color=COLORS["rest"])
    axes.bar_label(bars, labels=[f"{ms / floor:.2f}" for _, floor, ms in measured], fontsize=8)
    axes.set_title("milliseconds of a step at the largest batch")
    axes.legend(frameon=False)
    _names(axes, rows)


def _names(axes: Any, rows: Sequence[Row]) -> None:
    axes.set_xticks(range(len(rows)), [row.label.replace(", ", ",\n") for row in rows], rotation=30, ha="right")


def _quotient(value: float | None, base: float | None) -> float | None:
    return value / base if value and base else None
