"""Pairs of stories of one seed, of a bounded model and of the full one; and what a judge is asked of them."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from msrnn.errors import UsageError
from msrnn.evaluation.cells import Cell
from msrnn.evaluation.prompts import JUDGE, STORY, filled
from msrnn.evaluation.store import Row, Store
from msrnn.evaluation.story.report import forgot
from msrnn.policy import FULL

TOLD_ALIKE = ("fingerprint", "dtype", "prompt", "most", "temperature")  # what stories must share to be compared


class Pair(NamedTuple):
    cell: Cell
    seed: int
    bounded: str
    full: str

    def prompt(self, swapped: bool) -> str:
        """The bounded model's story is response (A), or (B) if swapped."""
        first, second = (self.full, self.bounded) if swapped else (self.bounded, self.full)
        return filled(JUDGE, prompt=STORY, first=first, second=second)


class Pairs(NamedTuple):
    pairs: list[Pair]
    dropped: dict[Cell, int]  # pairs of each version in which nothing was forgotten: they are the same story
    told: Row  # what stands beside the stories

    @property
    def cells(self) -> list[Cell]:
        return list(self.dropped)


def pairs(store: Store) -> Pairs:
    """Of the stories that were told last, and as they were."""
    if not store.rows:
        raise UsageError(f"{store.path}: no stories in it; tell some first, with msrnn eval story")
    last = {name: store.rows[-1][name] for name in TOLD_ALIKE}
    versions: dict[Cell, dict[int, Row]] = {}
    for row in store.matching(last):
        versions.setdefault(Cell(row["policy"], row["size"]), {})[row["seed"]] = row
    full = versions.pop(Cell(FULL, None), {})
    shared = {cell: [seed for seed in sorted(told) if seed in full] for cell, told in versions.items()}
    if not any(shared.values()):
        raise UsageError(f"{store.path}: no story of a bounded model and of the full one by the same seed")
    kept = {cell: [seed for seed in seeds if forgot(versions[cell][seed])] for cell, seeds in shared.items()}
    found = [
        Pair(cell, seed, versions[cell][seed]["story"], full[seed]["story"])
        for cell, seeds in kept.items()
        for seed in seeds
    ]
    dropped = {cell: len(shared[cell]) - len(kept[cell]) for cell in shared}
    return Pairs(found, dropped, {**last, "model": store.rows[-1].get("model", "")})


def fingerprint(prompt: str) -> str:
    return hashlib.sha256(prompt.encode()).hexdigest()[:16]
