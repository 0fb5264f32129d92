"""Figures of one setting, each measured once: a view of a store whose rows are single values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msrnn.evaluate.store import Row, Store


class Ledger:
    """Cells of one setting. What was measured in the same setting is not measured again; what did not fit is."""

    def __init__(self, path: Path | None, setting: Row) -> None:
        self.store, self.setting = Store(path), setting

    def cell(self, key: Row, unit: str, measure: Callable[[], float | None]) -> float | None:
        """The value of a cell; None: it did not fit into memory."""
        for row in reversed(self.store.matching({**key, **self.setting})):
            if row.get("value") is not None:
                return float(row["value"])
        value = measure()
        self.store.append({**key, "value": value, "unit": unit, **self.setting})
        return value
