"""The efficiency of a decode step: memory, batch, time and throughput of every contender, over a measured floor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from msrnn.evaluation.efficiency import PROMPT
from msrnn.evaluation.efficiency.contenders import Contender, Setup, random_tokens
from msrnn.evaluation.efficiency.ledger import Ledger
from msrnn.evaluation.efficiency.timing import Floor, Times, bandwidth, milliseconds, products, weight_bytes
from msrnn.evaluation.memory import free_bytes, if_it_fits, largest, unused_bytes

T = TypeVar("T")
UNLIMITED = 2**16
AGAIN = 2  # times that a step below its floor is measured again
EQUAL = 128


@dataclass(frozen=True)
class Asked:
    """At which batches to measure. The equal one is `EQUAL` unless asked for, if the first contender fits as many."""

    batch: int | None = None  # instead of the largest that fits
    max_batch: int | None = None
    equal_batch: int | None = None
    prefill_batch: int | None = None

    def on(self, device: torch.device) -> Asked:
        """What was not asked for, as suits the device: a CPU is slow, and its memory is not for us alone."""
        suits = (8, 1, 1) if device.type == "cpu" else (UNLIMITED, None, 8)
        asked = (self.max_batch, self.equal_batch, self.prefill_batch)
        return Asked(self.batch, *(own or other for own, other in zip(asked, suits, strict=True)))


@dataclass(frozen=True)
class Row:
    """One contender's figures; None: it did not fit, or is not measured."""

    label: str
    size: int | None
    nbytes: int  # of one sequence's states
    batch: int | None = None  # the largest
    ms: Times | None = None  # of a step at that batch
    floor: float | None = None  # of that step, in milliseconds
    equal_batch: int | None = None
    equal_ms: Times | None = None
    one_ms: Times | None = None  # of a step of one sequence
    prefill_ms: Times | None = None
    whole: float | None = None  # tokens per second over whole sequences, at the largest batch

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Row:
        """From a store, whose JSON has lists instead of times."""
        values: dict[str, Any] = {
            name: Times(*value) if isinstance(value, list) else value for name, value in fields.items()
        }
        return cls(**values)

    @property
    def fields(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, Times) else value for name, value in vars(self).items()}

    @property
    def impossible(self) -> bool:
        """A step cannot take less than its floor: one of them was disturbed."""
        return self.over_floor is not None and self.over_floor < 1

    @property
    def unsteady(self) -> bool:
        """Whether runs of a time still disagreed after they were repeated."""
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


def steps_in_buckets(buckets: Sequence[int], prompt: int, length: int) -> list[int]:
    """How many of the tokens from `prompt` to `length` are read with each bucket's rows; the last takes the rest."""
    ends = [*buckets[:-1], length] if buckets else []
    return [max(0, end - max(prompt, start)) for start, end in zip([0, *ends], ends, strict=False)]


class Bench:
    """Measures cells of a ledger. `say` is told what is being measured, and what did not fit."""

    def __init__(self, setup: Setup, asked: Asked, ledger: Ledger, say: Callable[[str], None]) -> None:
        self.model, self.device, self.length = setup.model, setup.model.device, setup.length
        self.asked, self.ledger, self.say = asked.on(self.device), ledger, say
        self.cap = self.asked.max_batch or UNLIMITED
        self._spare = 0  # bytes that the newest step left free

    def table(self, contenders: Iterable[Contender]) -> list[Row]:
        """One row for each; what the first one fits may bound the equal batch of all."""
        rows: list[Row] = []
        equal = self.asked.equal_batch
        for contender in contenders:
            row = self._at_largest(contender)
            if equal is None:
                equal = min(EQUAL, row.batch or EQUAL)
            rows.append(self._at_others(contender, row, equal))
            self.ledger.keep(contender.label, contender.nbytes, vars(self.asked), rows[-1].fields)
        return rows

    def others(self, rows: Sequence[Row]) -> list[Row]:
        """Rows of earlier commands in the same environment, measured at the same batches."""
        shown = {row.label for row in rows}
        found = self.ledger.rows(vars(self.asked))
        return [Row.of(fields) for label, fields in found.items() if label not in shown]

    def _at_largest(self, contender: Contender) -> Row:
        key = {"contender": contender.label, "cell": "state"}
        self.ledger.cell(key, "bytes", lambda: contender.nbytes)
        row = Row(contender.label, contender.size, contender.nbytes)
        batch = self.asked.batch or self._largest(contender)
        before = len(self.ledger.store.rows)
        ms = self._step(contender, batch, contender.rows) if batch else None
        if not batch or ms is None:
            return row
        row = replace(row, batch=batch, ms=ms, floor=self._floor(contender, batch))
        return self._until_possible(contender, row) if len(self.ledger.store.rows) > before else row

    def _until_possible(self, contender: Contender, row: Row) -> Row:
        """A time below its floor and the floor are measured again, twice at most."""
        assert row.batch is not None
        for _ in range(AGAIN):
            if not row.impossible:
                break
            self.say(f"{row.label}: the step is faster than its floor, which cannot be; measuring both again")
            floor = self._floor(contender, row.batch, anew=True)
            row = replace(row, ms=self._step(contender, row.batch, contender.rows, anew=True), floor=floor)
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

    def _step(self, contender: Contender, batch: int, rows: int, anew: bool = False) -> Times | None:
        def timed() -> Times:
            if 0 < unused_bytes(self.device) < batch * contender.nbytes * rows // contender.rows:
                raise MemoryError  # some systems promise memory that they do not have, and kill who uses it
            with contender.stepping(batch, rows) as step:
                took = milliseconds(step, self.device)
                self._spare = free_bytes(self.device)
                return took

        key = {"contender": contender.label, "cell": "step", "batch": batch, "rows": rows}
        return self._times(key, timed, f"{contender.label}: a step of {_many(batch)}, {rows:,} states each", anew)

    def _prefill(self, contender: Contender) -> Times | None:
        batch = self.asked.prefill_batch or 1
        read = contender.reading(random_tokens(self.model, batch, self.length))
        if read is None:
            return None
        key = {"contender": contender.label, "cell": "prefill", "batch": batch}
        what = f"{contender.label}: reading {_many(batch)} of {self.length:,} tokens"
        return self._times(
            key, lambda: milliseconds(read, self.device, repeats=3, warm_ups=1, least=1, patience=10), what
        )

    def _whole(self, contender: Contender, batch: int) -> float | None:
        """Tokens per second of sequences from a short prompt to the length: each bucket's steps at that step's time."""
        total, counts = 0.0, steps_in_buckets(contender.buckets, PROMPT, self.length)
        for rows, steps in zip(contender.buckets, counts, strict=True):
            if not steps:
                continue
            ms = self._step(contender, batch, rows)
            if ms is None:
                return None
            total += steps * ms.median
        return 1000 * batch * (self.length - PROMPT) / total if total else None

    def _floor(self, contender: Contender, batch: int, anew: bool = False) -> float | None:
        """With `anew`, the lower of what was known and what is measured again: no floor may be too high."""
        reads = self._best("the read bandwidth", {"cell": "bandwidth"}, lambda: bandwidth(self.device) / 1e6, max, anew)
        key = {"cell": "products", "batch": batch}
        what = f"the matrix products of {_many(batch)}"
        alone = self._best(what, key, lambda: products(self.model, batch), min, anew)
        if reads is None or alone is None:
            return None
        return Floor(reads * 1e6, weight_bytes(self.model)).milliseconds(batch * contender.nbytes, alone)

    def _best(
        self,
        what: str,
        key: dict[str, Any],
        measure: Callable[[], float],
        better: Callable[[float, float], float],
        anew: bool,
    ) -> float | None:
        unit = "GB/s" if better is max else "ms"
        known = self.ledger.cell(key, unit, lambda: self._measured(measure, what))
        if known is None or not anew:
            return known

        def again() -> float:
            value = self._measured(measure, what)
            return known if value is None else better(known, value)

        return self.ledger.cell(key, unit, again, anew=True)

    def _times(self, key: dict[str, Any], measure: Callable[[], Times], what: str, anew: bool = False) -> Times | None:
        return self.ledger.times(key, lambda: self._measured(measure, what), anew)

    def _measured(self, measure: Callable[[], T], what: str) -> T | None:
        self.say(what)
        value = if_it_fits(measure)
        if value is None:
            self.say(f"{what}: does not fit into memory")
        return value


def _many(batch: int) -> str:
    return f"{batch:,} sequence{'s' if batch > 1 else ''}"
