"""Pairs of stories for a judge: a bounded model's and the full model's of the same seed, in both orders."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from msrnn.errors import FileError
from msrnn.evaluation.cells import FULL_MODEL, Cell, cell_of
from msrnn.evaluation.data.prompts import JUDGE, STORY, fill_template
from msrnn.evaluation.store import Record, Store
from msrnn.evaluation.tasks.story import SAMPLER, has_evictions

STORY_KEY = ("fingerprint", "dtype", "prompt", "most", "temperature")  # what stories must share to be compared


class Pair(NamedTuple):
    """The stories of one seed, by a bounded model and by the full one."""

    cell: Cell
    seed: int
    bounded: str
    full: str

    def prompt(self, swapped: bool) -> str:
        """The bounded model's story is response (A), or (B) if swapped."""
        first, second = (self.full, self.bounded) if swapped else (self.bounded, self.full)
        return fill_template(JUDGE, prompt=STORY, first=first, second=second)


class Pairs(NamedTuple):
    pairs: list[Pair]
    dropped: dict[Cell, int]  # pairs of each version in which nothing was evicted: both stories are the same
    facts: Record  # about the stories

    @property
    def cells(self) -> list[Cell]:
        return list(self.dropped)


class Comparison(NamedTuple):
    """A pair in one order."""

    pair: Pair
    swapped: bool

    @property
    def prompt(self) -> str:
        return self.pair.prompt(self.swapped)

    @property
    def key(self) -> str:
        return hashlib.sha256(self.prompt.encode()).hexdigest()[:16]


def pairs(store: Store) -> Pairs:
    """The newest stories of a store, and those that were generated with the same settings."""
    if not store.records:
        raise FileError("has no stories", store.path, advice="generate some first")
    last = store.records[-1]
    newest = {name: last[name] for name in STORY_KEY}
    versions: dict[Cell, dict[int, Record]] = {}
    for record in [record for record in store.matching(newest) if record.get(SAMPLER) == last.get(SAMPLER)]:
        versions.setdefault(cell_of(record), {})[record["seed"]] = record
    full = versions.pop(FULL_MODEL, {})
    shared = {cell: [seed for seed in sorted(stories) if seed in full] for cell, stories in versions.items()}
    if not any(shared.values()):
        raise FileError(
            "has no story of a bounded model and of the full one by the same seed",
            store.path,
            advice="generate both first",
        )
    kept = {cell: [seed for seed in seeds if has_evictions(versions[cell][seed])] for cell, seeds in shared.items()}
    matched = [
        Pair(cell, seed, versions[cell][seed]["story"], full[seed]["story"])
        for cell, seeds in kept.items()
        for seed in seeds
    ]
    dropped = {cell: len(shared[cell]) - len(kept[cell]) for cell in shared}
    return Pairs(matched, dropped, {**newest, "model": last.get("model", "")})
