"""Stories of every version of a model, each a row of a store: what is told already is not told again."""

from __future__ import annotations

import hashlib
import json
from time import perf_counter
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from msrnn.evaluate.cells import Cell
from msrnn.evaluate.memory import batch_that_fits, release
from msrnn.evaluate.speaking import say
from msrnn.evaluate.store import Row, Store
from msrnn.evaluate.story.noise import Noise
from msrnn.evaluate.watch import Watch
from msrnn.policy import FULL
from msrnn.rnn import MultiStateRNN

Stories = dict[Cell, list[Row]]  # by seed, in their order


class Telling(NamedTuple):
    """What all stories share."""

    prompt: list[int]
    most: int  # tokens of a story
    temperature: float
    seeds: list[int]

    @property
    def key(self) -> Row:
        digest = hashlib.sha256(json.dumps(self.prompt).encode()).hexdigest()[:16]
        return {"prompt": digest, "most": self.most, "temperature": self.temperature}

    def free_at(self, size: int) -> int:
        """The first of a story's tokens, counted from 0, that something forgotten can change.

        The token that makes somebody leave has still seen all, and so has the choice that follows it.
        """
        return max(0, size + 2 - len(self.prompt))


class Run:
    """One model. `beside` is written into every row, and tells no stories apart."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        telling: Telling,
        ends: set[int],
        store: Store,
        batch: int,
        beside: dict[str, Any],
    ) -> None:
        self.model, self.tokenizer, self.telling, self.ends, self.store = model, tokenizer, telling, ends, store
        self.batch, self.beside = batch, beside
        told = MultiStateRNN(model, FULL, None).plan.fingerprint
        self.key = {"fingerprint": told["model"], "dtype": told["dtype"], **telling.key}

    def results(self, cells: list[Cell], watch: Watch | None = None) -> Stories:
        """An interruption costs the batch that was being told, and no other."""
        watch = watch or Watch()
        todo = {cell: self._batches(cell) for cell in cells}
        columns = len(self.telling.prompt) + self.telling.most
        watch.total(sum(len(batch) * columns for batches in todo.values() for batch in batches))
        for cell, batches in todo.items():
            if batches:
                watch.cell(cell)
                rnn = self._rnn(cell)
                for batch in batches:
                    self._tell(cell, rnn, batch, watch)
                del rnn
                release()
        return {cell: [self._stored(cell)[seed] for seed in self.telling.seeds] for cell in cells}

    def _rnn(self, cell: Cell) -> MultiStateRNN:
        """`full` has a state, too, with room for everything: the same attention, with the same rounding."""
        if cell.size is None:
            return MultiStateRNN(self.model, "window", len(self.telling.prompt) + self.telling.most)
        return MultiStateRNN(self.model, cell.policy, cell.size)

    def _stored(self, cell: Cell) -> dict[int, Row]:
        return {row["seed"]: row for row in self.store.matching({**cell.key, **self.key}) if "ids" in row}

    def _batches(self, cell: Cell) -> list[list[int]]:
        """The seeds that are told together are the same for every version, so that rounding is, too."""
        known, seeds = self._stored(cell), self.telling.seeds
        batches = [seeds[start : start + self.batch] for start in range(0, len(seeds), self.batch)]
        return [batch for batch in batches if any(seed not in known for seed in batch)]

    def _tell(self, cell: Cell, rnn: MultiStateRNN, seeds: list[int], watch: Watch) -> None:
        telling, began = self.telling, perf_counter()
        noise = Noise(seeds, telling.temperature)
        with batch_that_fits(len(seeds), cell.label):
            told = say(rnn, [telling.prompt] * len(seeds), self.ends, telling.most, noise, watch.tokens)
        beside = {"seconds": (perf_counter() - began) / len(seeds), "backend": "/".join(sorted(set(rnn.plan.backends)))}
        known = self._stored(cell)
        for seed, ids in zip(seeds, told, strict=True):
            if seed not in known:
                story = {"ids": ids, "ended": len(ids) < telling.most, "prompt_tokens": len(telling.prompt)}
                text = self.tokenizer.decode(ids, skip_special_tokens=True)
                self.store.append(
                    {**cell.key, **self.key, "seed": seed, "story": text, **story, **beside, **self.beside}
                )
