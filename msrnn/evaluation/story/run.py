"""Stories of every version of a model, each a row of a store: what is told already is not told again."""

from __future__ import annotations

import hashlib
import json
from time import perf_counter
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from msrnn.evaluation.cells import Cell, stored_cells
from msrnn.evaluation.memory import batch_that_fits, release
from msrnn.evaluation.rows import fields, listed, number, optional, text, truth, whole
from msrnn.evaluation.speaking import roomy, say
from msrnn.evaluation.store import Row, Store
from msrnn.evaluation.story.noise import Noise
from msrnn.evaluation.watch import Watch
from msrnn.hf.rnn import MultiStateRNN
from msrnn.policy import FULL

FULL_MODEL = Cell(FULL, None)
CHECK = fields(
    policy=text,
    size=optional(whole),
    seed=whole,
    ids=listed(whole),
    story=text,
    ended=truth,
    prompt_tokens=whole,
    fingerprint=text,
    dtype=text,
    prompt=text,
    most=whole,
    temperature=number,
)
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
        told = MultiStateRNN(model, FULL, None).spec.fingerprint
        self.key = {"fingerprint": told["model"], "dtype": told["dtype"], **telling.key}

    def results(self, cells: list[Cell], watch: Watch | None = None) -> Stories:
        """The full model's first, since others begin with them; an interruption costs the batch that was being told."""
        watch = watch or Watch()
        done = {cell: self._done(cell) for cell in dict.fromkeys([FULL_MODEL, *cells])}
        missing = {cell: [seed for seed in self.telling.seeds if seed not in done[cell]] for cell in done}
        columns = len(self.telling.prompt) + self.telling.most
        left, every = sum(len(seeds) for seeds in missing.values()), len(done) * len(self.telling.seeds)
        watch.resumed(every - left, every, "stories")
        watch.total(left * columns)
        for cell, seeds in missing.items():
            if seeds:
                watch.cell(cell)
                self._tell_all(cell, seeds, watch)
                release()
        return {cell: [self._stored(cell)[seed] for seed in self.telling.seeds] for cell in cells}

    def others(self, cells: list[Cell]) -> Stories:
        """The stories of all other versions that the store has of the same model, prompt and seeds."""
        found = {cell: self._stored(cell) for cell in stored_cells(self.store.matching(self.key)) if cell not in cells}
        seeds = self.telling.seeds
        return {cell: [told[n] for n in seeds] for cell, told in found.items() if all(n in told for n in seeds)}

    def _tell_all(self, cell: Cell, seeds: list[int], watch: Watch) -> None:
        """Before it can have forgotten anything, a version tells what the full model does: that much is taken over."""
        rnn, told = self._rnn(cell), self._stored(FULL_MODEL) if cell.size is not None else {}
        first = self.telling.free_at(cell.size) if cell.size is not None else 0
        backend = {"backend": "/".join(sorted(set(rnn.spec.backends)))}
        same = [seed for seed in seeds if cell.size is not None and _choices(told[seed]) <= first]
        for seed in same:
            self._append(cell, seed, told[seed]["ids"], {"taken_over": len(told[seed]["ids"]), **backend})
            watch.tokens(len(self.telling.prompt) + self.telling.most)
        rest = [seed for seed in seeds if seed not in same]
        for start in range(0, len(rest), self.batch):
            some, began = rest[start : start + self.batch], perf_counter()
            begun = [told[seed]["ids"][:first] if told else [] for seed in some]
            with batch_that_fits(len(some), cell.label):
                said = self._said(rnn, some, begun, first, watch)
            seconds = (perf_counter() - began) / len(some)
            for seed, before, after in zip(some, begun, said, strict=True):
                self._append(cell, seed, before + after, {"taken_over": first, "seconds": seconds, **backend})

    def _said(
        self, rnn: MultiStateRNN, seeds: list[int], begun: list[list[int]], first: int, watch: Watch
    ) -> list[list[int]]:
        noise = Noise(seeds, self.telling.temperature, skipped=first)
        prompts = [self.telling.prompt + ids for ids in begun]
        return say(rnn, prompts, self.ends, self.telling.most - first, noise, watch.tokens)

    def _rnn(self, cell: Cell) -> MultiStateRNN:
        """`full` has a state, too, with room for everything: the same attention, in the same dtype."""
        if cell.size is None:
            return roomy(self.model, len(self.telling.prompt) + self.telling.most)
        return MultiStateRNN(self.model, cell.policy, cell.size)

    def _stored(self, cell: Cell) -> dict[int, Row]:
        return {row["seed"]: row for row in self.store.matching({**cell.key, **self.key})}

    def _done(self, cell: Cell) -> set[int]:
        return {row["seed"] for row in self.store.done({**cell.key, **self.key})}

    def _append(self, cell: Cell, seed: int, ids: list[int], found: dict[str, Any]) -> None:
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        length = {"ended": len(ids) < self.telling.most, "prompt_tokens": len(self.telling.prompt)}
        story = {"seed": seed, "story": text, "ids": ids, **length}
        self.store.append({**cell.key, **self.key, **story, **found, **self.beside})


def _choices(story: Row) -> int:
    """That were made for a story; to end it is one, too."""
    return len(story["ids"]) + bool(story["ended"])
