"""Measurements of one environment, each made once: a view of a store whose rows are single values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msrnn.evaluation.efficiency.timing import Times
from msrnn.evaluation.rows import fields, mapping, number, optional, text
from msrnn.evaluation.store import Row, Store

ROW = "row"  # the cell that keeps a whole row of the table
_CELL = fields(cell=text, value=optional(number))
_ROW = fields(cell=text, value=optional(number), contender=text, asked=mapping, fields=mapping)


def check_row(row: Row) -> str | None:
    return _ROW(row) if row.get("cell") == ROW else _CELL(row)


class Ledger:
    """What was measured in the same environment is not measured again; what did not fit into memory is."""

    def __init__(self, store: Store, setting: Row) -> None:
        self.store, self.setting = store, setting

    @property
    def known(self) -> int:
        """How many measurements are there already."""
        return sum(row.get("value") is not None and row["cell"] != ROW for row in self.store.done(self.setting))

    def cell(self, key: Row, unit: str, measure: Callable[[], float | None], anew: bool = False) -> float | None:
        """The value of a cell; None: it did not fit into memory."""
        found = None if anew else self._found(key)
        if found:
            return float(found["value"])
        value = measure()
        self.store.append({**key, "value": value, "unit": unit, **self.setting})
        return value

    def times(self, key: Row, measure: Callable[[], Times | None], anew: bool = False) -> Times | None:
        """The same of a cell that is a time, with its spread."""
        found = None if anew else self._found(key)
        if found:
            value = float(found["value"])
            return Times(value, found.get("low", value), found.get("high", value), found.get("steady", True))
        times = measure()
        spread = {"low": times.low, "high": times.high, "steady": times.steady} if times else {}
        self.store.append({**key, "value": times and times.median, "unit": "ms", **spread, **self.setting})
        return times

    def _found(self, key: Row) -> Row | None:
        rows = self.store.done({**key, **self.setting})
        return next((row for row in reversed(rows) if row.get("value") is not None), None)

    def keep(self, label: str, nbytes: int, asked: Row, fields: dict[str, Any]) -> None:
        """A whole row of the table, for tables of later commands."""
        if self.rows(asked).get(label) != fields:
            key = {"contender": label, "cell": ROW, "asked": asked}
            self.store.append({**key, "value": nbytes, "unit": "bytes", "fields": fields, **self.setting})

    def rows(self, asked: Row) -> dict[str, dict[str, Any]]:
        """Whole rows by their label, of this command and of earlier ones; the newest of each."""
        found = self.store.matching({"cell": ROW, "asked": asked, **self.setting})
        return {row["contender"]: row["fields"] for row in found}
