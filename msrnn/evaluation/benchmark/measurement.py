"""Measure decode steps: memory, batch, time and throughput of every contender, and a measured lower limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from msrnn.core.device_memory import if_it_fits
from msrnn.evaluation.batch_size import free_bytes, largest, query_free_memory
from msrnn.evaluation.benchmark import PROMPT
from msrnn.evaluation.benchmark.contenders import Contender, Setup, random_tokens
from msrnn.evaluation.benchmark.table import Row
from msrnn.evaluation.benchmark.timing import Floor, Times, bandwidth, milliseconds, products, weight_bytes
from msrnn.evaluation.schemas import Schema, Text, check_of
from msrnn.evaluation.store import Record, Store
from msrnn.hf.cuda_graphs import WORTH_CAPTURING

T = TypeVar("T")
UNLIMITED = 2**16
REPEATS = 2  # of a step that is below its floor
EQUAL = 128
ROW = "row"  # the cell that holds a whole row of the table


class CellSchema(Schema):
    """One measurement; without a value, it did not fit into memory."""

    cell: Text
    value: float | None


class RowSchema(CellSchema):
    contender: Text
    asked: dict[Text, Any]
    fields: dict[Text, Any]


_check_cell, _check_whole_row = check_of(CellSchema), check_of(RowSchema)


def check_record(record: Record) -> str | None:
    return _check_whole_row(record) if record.get("cell") == ROW else _check_cell(record)


class Ledger:
    """Measurements of one environment in a store, each taken once; what did not fit into memory is tried again."""

    def __init__(self, store: Store, environment: Record) -> None:
        self.store, self.environment = store, environment

    @property
    def known(self) -> int:
        """The number of measurements that are known."""
        return sum(
            row.get("value") is not None and row["cell"] != ROW for row in self.store.find_done(self.environment)
        )

    def cell(
        self, key: Record, unit: str, measure: Callable[[], float | None], remeasure: bool = False
    ) -> float | None:
        """The stored value of a cell, or a new measurement; None: it did not fit into memory."""
        stored = None if remeasure else self._find_stored(key)
        if stored:
            return float(stored["value"])
        value = measure()
        self.store.append({**key, "value": value, "unit": unit, **self.environment})
        return value

    def times(self, key: Record, measure: Callable[[], Times | None], remeasure: bool = False) -> Times | None:
        """The same for a time, with its range."""
        stored = None if remeasure else self._find_stored(key)
        if stored:
            value = float(stored["value"])
            return Times(value, stored.get("low", value), stored.get("high", value), stored.get("steady", True))
        times = measure()
        spread = {"low": times.low, "high": times.high, "steady": times.steady} if times else {}
        self.store.append({**key, "value": times and times.median, "unit": "ms", **spread, **self.environment})
        return times

    def _find_stored(self, key: Record) -> Record | None:
        rows = self.store.find_done({**key, **self.environment})
        return next((row for row in reversed(rows) if row.get("value") is not None), None)

    def keep(self, label: str, nbytes: int, batches: Record, fields: dict[str, Any]) -> None:
        """Store a whole row of the table, for tables of later commands."""
        if self.rows(batches).get(label) != fields:
            key = {"contender": label, "cell": ROW, "asked": batches}
            self.store.append({**key, "value": nbytes, "unit": "bytes", "fields": fields, **self.environment})

    def rows(self, batches: Record) -> dict[str, dict[str, Any]]:
        """Whole rows by their label, of this command and of earlier ones; the newest of each."""
        stored = self.store.matching({"cell": ROW, "asked": batches, **self.environment})
        return {row["contender"]: row["fields"] for row in stored}


@dataclass(frozen=True)
class Batches:
    """The batches to measure at. The equal batch is `EQUAL` by default, or what the first contender fits."""

    batch: int | None = None  # instead of the largest that fits
    max_batch: int | None = None
    equal_batch: int | None = None
    prefill_batch: int | None = None

    def on(self, device: torch.device) -> Batches:
        """With the defaults of a device: a CPU is slow, and other programs need its memory."""
        defaults = (8, 1, 1) if device.type == "cpu" else (UNLIMITED, None, 8)
        given = (self.max_batch, self.equal_batch, self.prefill_batch)
        return Batches(self.batch, *(own or other for own, other in zip(given, defaults, strict=True)))


def steps_in_buckets(buckets: Sequence[int], prompt: int, length: int) -> list[int]:
    """The steps from `prompt` to `length` that run with the rows of each bucket; the last has the rest."""
    ends = [*buckets[:-1], length] if buckets else []
    return [max(0, end - max(prompt, start)) for start, end in zip([0, *ends], ends, strict=False)]


class Benchmark:
    """Measures contenders and keeps the results in a ledger. `note` prints what is measured, and what did not fit."""

    def __init__(self, setup: Setup, batches: Batches, ledger: Ledger, note: Callable[[str], object]) -> None:
        self.model, self.device, self.length = setup.model, setup.model.device, setup.length
        self.batches, self.ledger, self.note = batches.on(self.device), ledger, note
        self.cap = self.batches.max_batch or UNLIMITED
        self._spare = 0  # bytes that the newest step left free

    def rows(self, contenders: Iterable[Contender]) -> list[Row]:
        """A row for each contender; the largest batch of the first may bound the equal batch of all."""
        rows: list[Row] = []
        equal = self.batches.equal_batch
        for contender in contenders:
            row = self._at_largest(contender)
            if equal is None:
                equal = min(EQUAL, row.batch or EQUAL)
            rows.append(self._at_others(contender, row, equal))
            self.ledger.keep(contender.label, contender.nbytes, vars(self.batches), rows[-1].fields)
        return rows

    def others(self, rows: Sequence[Row]) -> list[Row]:
        """Rows of earlier commands in the same environment, at the same batches."""
        known = {row.label for row in rows}
        stored = self.ledger.rows(vars(self.batches))
        return [Row.of(fields) for label, fields in stored.items() if label not in known]

    def _at_largest(self, contender: Contender) -> Row:
        key = {"contender": contender.label, "cell": "state"}
        self.ledger.cell(key, "bytes", lambda: contender.nbytes)
        row = Row(contender.label, contender.size, contender.nbytes)
        batch = self.batches.batch or self._largest(contender)
        before = len(self.ledger.store.records)
        ms = self._step(contender, batch, contender.rows) if batch else None
        if not batch or ms is None:
            return row
        row = replace(row, batch=batch, ms=ms, floor=self._floor(contender, batch))
        return self._until_possible(contender, row) if len(self.ledger.store.records) > before else row

    def _until_possible(self, contender: Contender, row: Row) -> Row:
        """Measure a step that is below its floor again, and the floor as well; twice at most."""
        assert row.batch is not None
        for _ in range(REPEATS):
            if not row.impossible:
                break
            self.note(f"{row.label}: the step is faster than its floor, which is impossible; measuring both again")
            floor = self._floor(contender, row.batch, remeasure=True)
            row = replace(row, ms=self._step(contender, row.batch, contender.rows, remeasure=True), floor=floor)
        return row

    def _at_others(self, contender: Contender, row: Row, equal: int) -> Row:
        return replace(
            row,
            equal_batch=equal,
            equal_ms=self._step(contender, equal, contender.rows),
            one_ms=self._step(contender, 1, contender.rows),
            whole=self._whole(contender, row.batch) if row.batch else None,
            prefill_ms=self._prefill(contender),
        )

    def _largest(self, contender: Contender) -> int:
        def fits(batch: int) -> bool:
            return self._step(contender, batch, contender.rows) is not None

        def more(batch: int) -> int:
            return batch + self._spare // contender.nbytes

        def search() -> float | None:
            room = free_bytes(self.device)
            estimate = room // contender.nbytes if room else self.cap
            return largest(fits, estimate, self.cap, more) or None

        key = {"contender": contender.label, "cell": "largest", "max_batch": self.cap}
        return int(self.ledger.cell(key, "sequences", search) or 0)

    def _step(self, contender: Contender, batch: int, rows: int, remeasure: bool = False) -> Times | None:
        def time_step() -> Times:
            if 0 < query_free_memory(self.device) < batch * contender.nbytes * rows // contender.rows:
                raise MemoryError  # some systems overcommit memory, and kill a process that uses it
            with contender.stepping(batch, rows) as step:
                took = milliseconds(step, self.device)
                self._spare = free_bytes(self.device)
                return took

        key = {"contender": contender.label, "cell": "step", "batch": batch, "rows": rows}
        return self._times(
            key, time_step, f"{contender.label}: a step of {_sequences(batch)}, {rows:,} KV rows each", remeasure
        )

    def _prefill(self, contender: Contender) -> Times | None:
        batch = self.batches.prefill_batch or 1
        read = contender.reading(random_tokens(self.model, batch, self.length))
        if read is None:
            return None
        key = {"contender": contender.label, "cell": "prefill", "batch": batch}
        what = f"{contender.label}: reading {_sequences(batch)} of {self.length:,} tokens"
        warm_ups = 1 + (WORTH_CAPTURING if self.device.type == "cuda" else 0)
        return self._times(
            key, lambda: milliseconds(read, self.device, repeats=3, warm_ups=warm_ups, least=1, patience=10), what
        )

    def _whole(self, contender: Contender, batch: int) -> float | None:
        """Tokens per second of whole sequences from a short prompt on: the steps of each bucket at its step time."""
        total, counts = 0.0, steps_in_buckets(contender.buckets, PROMPT, self.length)
        for rows, steps in zip(contender.buckets, counts, strict=True):
            if not steps:
                continue
            ms = self._step(contender, batch, rows)
            if ms is None:
                return None
            total += steps * ms.median
        return 1000 * batch * (self.length - PROMPT) / total if total else None

    def _floor(self, contender: Contender, batch: int, remeasure: bool = False) -> float | None:
        """The floor of a step; with `remeasure`, the lower of the known one and a new one: it must not be too high."""
        reads = self._best(
            "the read bandwidth", {"cell": "bandwidth"}, lambda: bandwidth(self.device) / 1e6, max, remeasure
        )
        key = {"cell": "products", "batch": batch}
        what = f"the matrix products of {_sequences(batch)}"
        alone = self._best(what, key, lambda: products(self.model, batch), min, remeasure)
        if reads is None or alone is None:
            return None
        return Floor(reads * 1e6, weight_bytes(self.model)).milliseconds(batch * contender.nbytes, alone)

    def _best(
        self,
        what: str,
        key: dict[str, Any],
        measure: Callable[[], float],
        better: Callable[[float, float], float],
        remeasure: bool,
    ) -> float | None:
        unit = "GB/s" if better is max else "ms"
        known = self.ledger.cell(key, unit, lambda: self._measure(measure, what))
        if known is None or not remeasure:
            return known

        def again() -> float:
            value = self._measure(measure, what)
            return known if value is None else better(known, value)

        return self.ledger.cell(key, unit, again, remeasure=True)

    def _times(
        self, key: dict[str, Any], measure: Callable[[], Times], what: str, remeasure: bool = False
    ) -> Times | None:
        return self.ledger.times(key, lambda: self._measure(measure, what), remeasure)

    def _measure(self, measure: Callable[[], T], what: str) -> T | None:
        self.note(what)
        value = if_it_fits(measure)
        if value is None:
            self.note(f"{what}: does not fit into memory")
        return value


def _sequences(batch: int) -> str:
    return f"{batch:,} sequence{'s' if batch > 1 else ''}"
