"""The efficiency of a decode step: memory, batch, time and throughput of every contender, over a measured floor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from msrnn.evaluate.efficiency import PROMPT
from msrnn.evaluate.efficiency.contenders import Contender, Setup, random_tokens
from msrnn.evaluate.efficiency.ledger import Ledger
from msrnn.evaluate.efficiency.timing import Floor, bandwidth, milliseconds, products, weight_bytes
from msrnn.evaluate.memory import free_bytes, if_it_fits, largest

UNLIMITED = 2**16
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
    ms: float | None = None  # of a step at that batch
    floor: float | None = None  # of that step, in milliseconds
    equal_batch: int | None = None
    equal_ms: float | None = None
    one_ms: float | None = None  # of a step of one sequence
    prefill_ms: float | None = None
    whole: float | None = None  # tokens per second over whole sequences, at the largest batch

    @property
    def throughput(self) -> float | None:
        return _per_second(self.batch, self.ms)

    @property
    def equal_throughput(self) -> float | None:
        return _per_second(self.equal_batch, self.equal_ms)

    @property
    def over_floor(self) -> float | None:
        return self.ms / self.floor if self.ms and self.floor else None


def _per_second(batch: int | None, ms: float | None) -> float | None:
    return 1000 * batch / ms if batch and ms else None


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
        return rows

    def _at_largest(self, contender: Contender) -> Row:
        key = {"contender": contender.label, "cell": "state"}
        self.ledger.cell(key, "bytes", lambda: contender.nbytes)
        row = Row(contender.label, contender.size, contender.nbytes)
        batch = self.asked.batch or self._largest(contender)
        ms = self._step(contender, batch, contender.rows) if batch else None
        if not batch or ms is None:
            return row
        return replace(row, batch=batch, ms=ms, floor=self._floor(contender, batch))

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

    def _step(self, contender: Contender, batch: int, rows: int) -> float | None:
        def timed() -> float:
            with contender.stepping(batch, rows) as step:
                took = milliseconds(step, self.device)
                self._spare = free_bytes(self.device)
                return took

        key = {"contender": contender.label, "cell": "step", "batch": batch, "rows": rows}
        return self._cell(key, timed, f"{contender.label}: a step of {_many(batch)}, {rows:,} states each")

    def _prefill(self, contender: Contender) -> float | None:
        batch = self.asked.prefill_batch or 1
        read = contender.reading(random_tokens(self.model, batch, self.length))
        if read is None:
            return None
        key = {"contender": contender.label, "cell": "prefill", "batch": batch}
        what = f"{contender.label}: reading {_many(batch)} of {self.length:,} tokens"
        return self._cell(
            key, lambda: milliseconds(read, self.device, repeats=3, warm_ups=1, least=1, patience=10), what
        )

    def _whole(self, contender: Contender, batch: int) -> float | None:
        """Tokens per second of sequences from a short prompt to the length: each bucket's steps at that step's time."""
        total, counts = 0.0, steps_in_buckets(contender.buckets, PROMPT, self.length)
        for rows, steps in zip(contender.buckets, counts, strict=True):
            ms = self._step(contender, batch, rows) if steps else 0.0
            if ms is None:
                return None
            total += steps * ms
        return 1000 * batch * (self.length - PROMPT) / total if total else None

    def _floor(self, contender: Contender, batch: int) -> float | None:
        reads = self._cell({"cell": "bandwidth"}, lambda: bandwidth(self.device) / 1e6, "the read bandwidth", "GB/s")
        key = {"cell": "products", "batch": batch}
        alone = self._cell(key, lambda: products(self.model, batch), f"the matrix products of {_many(batch)}")
        if reads is None or alone is None:
            return None
        return Floor(reads * 1e6, weight_bytes(self.model)).milliseconds(batch * contender.nbytes, alone)

    def _cell(self, key: dict[str, Any], measure: Callable[[], float], what: str, unit: str = "ms") -> float | None:
        def told() -> float | None:
            self.say(what)
            value = if_it_fits(measure)
            if value is None:
                self.say(f"{what}: does not fit into memory")
            return value

        return self.ledger.cell(key, unit, told)


def _many(batch: int) -> str:
    return f"{batch:,} sequence{'s' if batch > 1 else ''}"
