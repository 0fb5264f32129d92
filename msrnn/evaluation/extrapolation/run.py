"""All cases on all texts, each leg of a batch a row of a store: what was stopped goes on in the middle of a text."""

from __future__ import annotations

from time import perf_counter
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from msrnn.evaluation.chunks import Data
from msrnn.evaluation.extrapolation.carried import Carried
from msrnn.evaluation.extrapolation.cases import Case, stored_cases
from msrnn.evaluation.extrapolation.legs import Course, leg_nll
from msrnn.evaluation.memory import batch_that_fits, release
from msrnn.evaluation.store import Row, Store
from msrnn.evaluation.watch import Watch
from msrnn.hf.rnn import MultiStateRNN
from msrnn.policy import FULL

Results = dict[Case, list[list[float]]]  # by text, in their order: the summed negative log-likelihood of each window


class _Batch(NamedTuple):
    texts: list[int]
    done: int  # tokens of each that are read already
    carried: Carried


class Run:
    """One model on the first tokens of texts. `beside` is written into every row, and tells no results apart."""

    def __init__(
        self, model: PreTrainedModel, data: Data, course: Course, store: Store, batch: int, beside: dict[str, Any]
    ) -> None:
        self.model, self.data, self.course, self.store, self.batch = model, data, course, store, batch
        plan = MultiStateRNN(model, FULL, None).spec
        told = plan.fingerprint
        self.key = {"fingerprint": told["model"], "dtype": told["dtype"], "window": course.window}
        backend = "/".join(sorted(set(plan.backends)))
        self.beside = {"tokens": data.length, "data": data.fingerprint, "backend": backend, **beside}

    def results(self, cases: list[Case], watch: Watch | None = None) -> Results:
        """Of every case; an interruption costs the leg that was being read, and no other."""
        watch = watch or Watch()
        todo = {case: self._batches(case) for case in cases}
        left = sum(len(b.texts) * (self.course.tokens - b.done) for batches in todo.values() for b in batches)
        every = len(cases) * len(self.data.keys) * self.course.tokens
        watch.resumed(every - left, every, "tokens")
        watch.total(left)
        for case, batches in todo.items():
            if batches:
                watch.cell(case)
                rnn = case.rnn(self.model)
                for batch in batches:
                    self._read(case, rnn, batch, watch)
                del rnn
                release()
        return {case: self._of(case) for case in cases}

    def others(self, cases: list[Case]) -> Results:
        """The results of all other cases that the store has of the same model, dtype, texts and windows."""
        rest = [case for case in stored_cases(self.store.matching(self.key)) if case not in cases]
        return {
            case: self._of(case)
            for case in rest
            if all(self._done(windows) == self.course.tokens for windows in self._stored(case).values())
        }

    def _of(self, case: Case) -> list[list[float]]:
        found, windows = self._stored(case), range(len(self.course.counts))
        return [[found[key][i] for i in windows] for key in self.data.keys]

    def _stored(self, case: Case) -> dict[str, dict[int, float]]:
        found = self._values(self.store.matching({**case.key, **self.key}))
        return {key: found[key] for key in self.data.keys}

    def _values(self, rows: list[Row]) -> dict[str, dict[int, float]]:
        """By a text's content and the number of a window."""
        found: dict[str, dict[int, float]] = {key: {} for key in self.data.keys}
        for row in rows:
            first = row["start"] // self.course.window
            for key, nll in zip(row["chunks"], row["nll"], strict=True):
                found.setdefault(key, {}).update(enumerate(nll, first))
        return found

    def _batches(self, case: Case) -> list[_Batch]:
        """The texts that are not read to their end, and from where their states go on."""
        stored = self._values(self.store.done({**case.key, **self.key}))
        done = [self._done(stored[key]) for key in self.data.keys]
        missing = [i for i, tokens in enumerate(done) if tokens < self.course.tokens]
        batches = []
        for start in range(0, len(missing), self.batch):
            texts = missing[start : start + self.batch]
            folder = self.store.path.with_suffix(".states") if self.store.path else None
            carried = Carried(folder, [case.key, self.key, [self.data.keys[i] for i in texts]])
            known = [tokens for tokens in carried.files if all(tokens <= done[i] for i in texts)]
            batches.append(_Batch(texts, max(known, default=0), carried))
        return batches

    def _done(self, windows: dict[int, float]) -> int:
        """How many tokens from a text's first on have been read."""
        known = next((i for i in range(len(self.course.counts)) if i not in windows), len(self.course.counts))
        return min(known * self.course.window, self.course.tokens)

    def _read(self, case: Case, rnn: MultiStateRNN, batch: _Batch, watch: Watch) -> None:
        ids = torch.tensor([self.data.chunks[i].ids for i in batch.texts])
        texts = {
            "chunks": [self.data.keys[i] for i in batch.texts],
            "texts": [self.data.chunks[i].book for i in batch.texts],
        }

        def on_block(columns: int) -> None:
            watch.tokens(columns * len(batch.texts))

        with batch_that_fits(len(batch.texts), case.label):
            state = rnn.load_state(batch.carried.files[batch.done]) if batch.done else rnn.state(len(batch.texts))
            for start, stop in self.course.legs(batch.done):
                began = perf_counter()
                nll = leg_nll(rnn, ids, state, self.course, (start, stop), on_block)
                row = {"start": start, "stop": stop, "nll": nll, "seconds": perf_counter() - began}
                # The new state comes first, then the row that counts on it: only then is the old one of no use.
                last = stop == self.course.tokens
                if not last:
                    batch.carried.save(state, stop)
                self.store.append({**case.key, **self.key, **texts, **row, **self.beside})
                batch.carried.forget(but=None if last else stop)
