"""The rows of an extrapolation's table: policies at a size, and the position ids of the tokens that they keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from msrnn.core.rope import COMPRESSED, ORIGINAL, name_of, spacing
from msrnn.errors import UsageError
from msrnn.evaluation.cells import FULL, Cell, row_name
from msrnn.hf.rnn import MultiStateRNN
from msrnn.policy import split_weights
from msrnn.size import resolve


class Case(NamedTuple):
    """A row of the table: a policy at a size, and the position ids of the tokens that it keeps."""

    policy: str
    positions: str
    size: int | None  # None: full, which has no limit

    @property
    def label(self) -> str:
        return f"{self.policy}@{self.positions}"

    @property
    def key(self) -> dict[str, Any]:
        return {**Cell(self.policy, self.size).key, "positions": self.positions}

    def rnn(self, model: PreTrainedModel) -> MultiStateRNN:
        return MultiStateRNN(model, **Cell(self.policy, self.size).options, positions=self.positions)


def cases(rows: Sequence[str], size: int) -> list[Case]:
    """Each row once. A row is POLICY@POSITIONS; positions are compressed unless given."""
    return list(dict.fromkeys(_case(row, size) for row in rows))


def _case(row: str, size: int) -> Case:
    weighted, rest = split_weights(row)
    name, _, positions = rest.partition("@")
    name = weighted + name
    policy, _ = resolve(name, size)
    if not policy.evicts:
        if positions not in ("", ORIGINAL):
            raise UsageError(f"row {row!r}: {FULL} evicts nothing, so it has no gaps; use {FULL}@{ORIGINAL}")
        return Case(FULL, ORIGINAL, None)
    return Case(row_name(name), name_of(spacing(positions or COMPRESSED)), size)
