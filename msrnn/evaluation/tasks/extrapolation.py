"""Perplexity far beyond the training length: one state reads each text, from the first token to the last.

A text is read in legs. The state is saved after each leg, so that an interrupted run resumes in the middle of a text.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from time import perf_counter

import torch
from transformers import PreTrainedModel

from msrnn.evaluation.data.texts import Data
from msrnn.evaluation.environment import model_identity
from msrnn.evaluation.schemas import ChunkSchema, Text, check_of
from msrnn.evaluation.store import Record
from msrnn.evaluation.task import Compute, Job, OnTokens, Task
from msrnn.evaluation.tasks.extrapolation_cases import Case
from msrnn.evaluation.tasks.extrapolation_legs import Course, leg_nll
from msrnn.evaluation.tasks.leg_states import LegStates, remove_empty_folder


class CourseSchema(ChunkSchema):
    """The losses of several texts in one stretch of tokens."""

    policy: Text
    size: int | None
    positions: Text
    start: int
    nll: list[list[float]]
    fingerprint: Text
    dtype: Text
    window: int


CHECK = check_of(CourseSchema)


class Extrapolation(Task[Case, str, list[float]]):
    """One model on the first tokens of texts. A result is the computed windows of a text, from the first on.

    states  the folder of the states that are saved after each leg; None: none are saved
    """

    unit = "tokens"
    shrinks = False  # a saved state is that of a whole batch

    def __init__(
        self, model: PreTrainedModel, data: Data, course: Course, states: Path | None, metadata: Record
    ) -> None:
        self.key = {**model_identity(model), "window": course.window}
        backend = self.key.pop("backend")
        self.metadata = {"tokens": data.length, "data": data.fingerprint, "backend": backend, **metadata}
        self.gpu_batch = len(data.chunks)
        self.data, self.course, self.states, self.windows = data, course, states, len(course.counts)
        self.texts = dict(zip(data.keys, data.chunks, strict=True))

    def cell_of(self, record: Record) -> Case:
        return Case(record["policy"], record["positions"], record["size"])

    def finish(self) -> None:
        if self.states is not None:
            remove_empty_folder(self.states)

    def items(self, cell: Case) -> list[str]:
        return self.data.keys

    def read(self, records: list[Record]) -> dict[str, list[float]]:
        known_windows: dict[str, dict[int, float]] = {key: {} for key in self.data.keys}
        for record in records:
            first = record["start"] // self.course.window
            for key, nll in zip(record["chunks"], record["nll"], strict=True):
                known_windows.setdefault(key, {}).update(enumerate(nll, first))
        return {
            key: [known[i] for i in takewhile(known.__contains__, range(self.windows))]
            for key, known in known_windows.items()
        }

    def complete(self, result: list[float]) -> bool:
        return len(result) == self.windows

    def count(self, job: Job[Case, str]) -> int:
        return self.work(job)

    def work(self, job: Job[Case, str]) -> int:
        return sum(len(texts) * (self.course.tokens - self._start(job, texts)) for texts in self.batches(job))

    def _open_states(self, cell: Case, texts: list[str]) -> LegStates:
        return LegStates(self.states, [cell.key, self.key, texts])

    def _start(self, job: Job[Case, str], texts: list[str]) -> int:
        """Tokens that a saved state of these texts has read, and whose windows are all in the store."""
        known = self.read(job.done(job.cell))
        done = min(min(len(known[text]) * self.course.window, self.course.tokens) for text in texts)
        return max((tokens for tokens in self._open_states(job.cell, texts).list_tokens() if tokens <= done), default=0)

    def prepare(self, job: Job[Case, str], model: PreTrainedModel) -> Compute[str]:
        rnn = job.cell.rnn(model)

        def compute(texts: list[str], on_tokens: OnTokens) -> Iterator[Record]:
            chunks, done = [self.texts[key] for key in texts], self._start(job, texts)
            states = self._open_states(job.cell, texts)
            ids = torch.tensor([chunk.ids for chunk in chunks])
            source = {"chunks": texts, "texts": [chunk.book for chunk in chunks]}

            def on_block(columns: int) -> None:
                on_tokens(columns * len(texts))

            state = states.load(done, rnn) if done else rnn.state(len(texts))
            for start, stop in self.course.legs(done):
                began = perf_counter()
                nll = leg_nll(rnn, ids, state, self.course, (start, stop), on_block)
                last = stop == self.course.tokens
                # The new state is saved before the record that depends on it; only then may the old one be removed.
                if not last:
                    states.save(stop, state, rnn)
                yield {**source, "start": start, "stop": stop, "nll": nll, "seconds": perf_counter() - began}
                states.delete(but=None if last else stop)

        return compute
