"""The result of an evaluation, as Python code gets it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from msrnn.evaluation.report import INLINE, Table, has_matplotlib
from msrnn.evaluation.store import Record

R = TypeVar("R")


@dataclass(frozen=True)
class EvaluationResult(Generic[R]):
    """The numbers of an evaluation and what they come from. `print(result)` shows the tables.

    report    the numbers with their 95 % confidence intervals; its methods depend on the evaluation
    tables    the same as tables, the main one first; a table has `markdown()` and `csv()`
    records   the lines of the results file that these numbers come from
    facts     what identifies the results, and the environment: hardware, versions, commit
    page      the tables and the facts as a Markdown page
    others    cells of earlier runs in the same folder that the tables show as well
    left_out  records of the folder that belong to other models, dtypes or data
    """

    report: R
    tables: list[Table]
    records: list[Record]
    facts: Record
    page: str
    draw: Callable[[Path], object] | None = None  # writes the figure into a folder
    others: list[str] = field(default_factory=list)
    left_out: int = 0

    @property
    def table(self) -> Table:
        """The main table."""
        return self.tables[0]

    def __str__(self) -> str:
        return "\n".join(f"{table.title}\n{_align(table)}" for table in self.tables)

    def write(self, folder: str | Path) -> None:
        """Write NAME.md, NAME.csv and, where matplotlib is installed, NAME.png and NAME.svg."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.table.name}.md").write_text(self.page)
        (folder / f"{self.table.name}.csv").write_text(self.table.csv())
        if self.draw and has_matplotlib():
            self.draw(folder)


def _align(table: Table) -> str:
    """Columns of text; names on the left, numbers on the right."""
    rows = [list(table.header), *table.strings(INLINE)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        numbers = (text.rjust(width) for text, width in zip(rest, widths[1:], strict=True))
        lines.append("  ".join([first.ljust(widths[0]), *numbers]).rstrip() + "\n")
    return "".join(lines)
