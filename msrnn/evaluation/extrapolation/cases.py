"""The rows of the table: which states are forgotten, and where those that are kept stand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from msrnn.core.rope import COMPRESSED, ORIGINAL, name_of, spacing
from msrnn.errors import UsageError
from msrnn.evaluation.cells import Cell
from msrnn.evaluation.rows import fields, listed, number, optional, paired, text, whole
from msrnn.evaluation.store import Row
from msrnn.hf.rnn import MultiStateRNN
from msrnn.policy import FULL, Policy, is_full, resolve

CHECK = paired(
    "chunks",
    "nll",
    fields(
        policy=text,
        size=optional(whole),
        positions=text,
        start=whole,
        chunks=listed(text),
        nll=listed(listed(number)),
        fingerprint=text,
        dtype=text,
        window=whole,
    ),
)


class Case(NamedTuple):
    policy: str
    positions: str
    size: int | None  # None: full, which has no limit

    @property
    def label(self) -> str:
        return f"{self.policy}@{self.positions}"

    @property
    def key(self) -> dict[str, Any]:
        """What a result depends on."""
        return {**Cell(self.policy, self.size).key, "positions": self.positions}

    def rnn(self, model: PreTrainedModel) -> MultiStateRNN:
        return MultiStateRNN(model, self.policy, self.size, positions=self.positions)


def stored_cases(rows: Iterable[Row]) -> list[Case]:
    """The cases of rows, each once; without those whose policy's name means something else now."""
    found: dict[Case, None] = {}
    for row in rows:
        case = Case(row["policy"], row["positions"], row["size"])
        with suppress(ValueError):
            if case.key["numbers"] == row.get("numbers"):
                found[case] = None
    return list(found)


def cases(rows: Sequence[str], size: int) -> list[Case]:
    """Each once; a row is written POLICY@POSITIONS, and without positions they are compressed."""
    return list(dict.fromkeys(_case(row, size) for row in rows))


def _case(row: str, size: int) -> Case:
    name, _, positions = row.partition("@")
    if is_full(name):
        if positions not in ("", ORIGINAL):
            raise UsageError(f"--row {row}: {FULL} leaves no gaps to close; write {FULL}@{ORIGINAL}")
        return Case(FULL, ORIGINAL, None)
    resolve(name, size)
    return Case(Policy.parse(name).name, name_of(spacing(positions or COMPRESSED)), size)
