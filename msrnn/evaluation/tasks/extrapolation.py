"""Perplexity far beyond the training length: of all tokens so far, and of each window of tokens.

A text is read in legs. The state is saved after each leg, so that an interrupted run resumes in the middle of a text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, takewhile
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.core.atomic import make_private_folder, remove_unfinished
from msrnn.core.rope import COMPRESSED, ORIGINAL, name_of, spacing
from msrnn.core.state import MultiState
from msrnn.errors import UsageError
from msrnn.evaluation import statistics
from msrnn.evaluation.cells import FULL, Cell, row_name
from msrnn.evaluation.data.texts import Data
from msrnn.evaluation.environment import model_identity
from msrnn.evaluation.loss import losses
from msrnn.evaluation.report import Table, document, plot_estimates, saved_figure
from msrnn.evaluation.schemas import ChunkSchema, Text, check_of
from msrnn.evaluation.statistics import Estimate
from msrnn.evaluation.store import Record, Store
from msrnn.evaluation.task import Compute, Job, OnTokens, Task
from msrnn.evaluation.tasks.perplexity import formatted
from msrnn.hf.rnn import MultiStateRNN
from msrnn.size import resolve

NAME = "extrapolation"


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
COLUMNS = (
    *("policy", "positions", "size", "tokens", "so_far", "so_far_low", "so_far_high"),
    *("window", "window_low", "window_high", "texts"),
)


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
        return MultiStateRNN(model, *Cell(self.policy, self.size).bounds, positions=self.positions)


def cases(rows: Sequence[str], size: int) -> list[Case]:
    """Each row once. A row is POLICY@POSITIONS; positions are compressed unless given."""
    return list(dict.fromkeys(_case(row, size) for row in rows))


def _case(row: str, size: int) -> Case:
    name, _, positions = row.partition("@")
    policy, _ = resolve(name, size)
    if not policy.evicts:
        if positions not in ("", ORIGINAL):
            raise UsageError(f"row {row!r}: {FULL} evicts nothing, so it has no gaps; use {FULL}@{ORIGINAL}")
        return Case(FULL, ORIGINAL, None)
    return Case(row_name(name), name_of(spacing(positions or COMPRESSED)), size)


class Course(NamedTuple):
    """How a text of `tokens` is read: in windows, end to end, and in legs of several windows."""

    tokens: int
    given: int  # tokens at the start that are not predicted
    window: int
    leg: int  # tokens of a leg, a multiple of the window

    @property
    def counts(self) -> list[int]:
        """Predicted tokens of each window."""
        starts = range(0, self.tokens, self.window)
        return [min(self.window, self.tokens - a) - (self.given if a == 0 else 0) for a in starts]

    def legs(self, start: int = 0) -> Iterator[tuple[int, int]]:
        """First token and end of each leg, from the leg that begins at `start` on."""
        return ((a, min(a + self.leg, self.tokens)) for a in range(start, self.tokens, self.leg))


def leg_nll(
    rnn: MultiStateRNN,
    input_ids: Tensor,
    state: MultiState,
    course: Course,
    leg: tuple[int, int],
    on_block: Callable[[int], None] | None = None,
) -> list[list[float]]:
    """Texts [B, T] -> the summed negative log-likelihood of each window of the leg, for each text.

    Before the leg, the state has read all earlier tokens but the last; after it, all but the last token of the leg.
    """
    start, stop = leg
    part = losses(rnn, input_ids[:, max(0, start - 1) : stop], state, on_block).cpu().double()
    nll = torch.zeros(len(input_ids), stop - start, dtype=torch.float64)
    nll[:, nll.shape[1] - part.shape[1] :] = part
    if start == 0:
        nll[:, : course.given] = 0.0
    return torch.stack([window.sum(-1) for window in nll.split(course.window, dim=1)], dim=1).tolist()


class SavedStates:
    """Files with the states of one batch of texts, by the tokens that they have read. Without a folder, none."""

    def __init__(self, folder: Path | None, key: Any) -> None:
        self.folder = folder
        self.name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def files(self) -> dict[int, Path]:
        paths = self.folder.glob(f"{self.name}-*.safetensors") if self.folder else []
        return {int(path.stem.rpartition("-")[2]): path for path in paths}

    def save(self, state: MultiState, tokens: int) -> None:
        if self.folder and self.folder.parent.exists():  # a worker on another machine may not have it
            make_private_folder(self.folder)
            state.save(self.folder / f"{self.name}-{tokens}.safetensors")

    def remove(self, but: int | None = None) -> None:
        """Remove all files but the one that the newest record needs."""
        for tokens, path in self.files.items():
            if tokens != but:
                path.unlink(missing_ok=True)  # processes that share a model all do this
        if self.folder:
            remove_unfinished(self.folder, lambda name: name.startswith(self.name))  # of a worker that was killed


Results = dict[Case, list[list[float]]]  # by text: the summed negative log-likelihood of each window


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
        if self.states and self.states.exists() and not any(self.states.iterdir()):
            with suppress(FileNotFoundError):
                self.states.rmdir()

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

    def _saved_states(self, cell: Case, texts: list[str]) -> SavedStates:
        return SavedStates(self.states, [cell.key, self.key, texts])

    def _start(self, job: Job[Case, str], texts: list[str]) -> int:
        """Tokens that a saved state of these texts has read, and whose windows are all in the store."""
        known = self.read(job.done(job.cell))
        done = min(min(len(known[text]) * self.course.window, self.course.tokens) for text in texts)
        return max((tokens for tokens in self._saved_states(job.cell, texts).files if tokens <= done), default=0)

    def prepare(self, job: Job[Case, str], model: PreTrainedModel) -> Compute[str]:
        rnn = job.cell.rnn(model)

        def compute(texts: list[str], on_tokens: OnTokens) -> Iterator[Record]:
            chunks, done = [self.texts[key] for key in texts], self._start(job, texts)
            states = self._saved_states(job.cell, texts)
            ids = torch.tensor([chunk.ids for chunk in chunks])
            source = {"chunks": texts, "texts": [chunk.book for chunk in chunks]}

            def on_block(columns: int) -> None:
                on_tokens(columns * len(texts))

            state = rnn.load_state(states.files[done]) if done else rnn.state(len(texts))
            for start, stop in self.course.legs(done):
                began = perf_counter()
                nll = leg_nll(rnn, ids, state, self.course, (start, stop), on_block)
                last = stop == self.course.tokens
                # The new state is saved before the record that depends on it; only then may the old one be removed.
                if not last:
                    states.save(state, stop)
                yield {**source, "start": start, "stop": stop, "nll": nll, "seconds": perf_counter() - began}
                states.remove(but=None if last else stop)

        return compute


def states_folder(store: Store) -> Path | None:
    """Where the states of a run are saved: next to its records."""
    return store.path.resolve().with_suffix(".states") if store.path else None


@dataclass(frozen=True)
class Report:
    results: Results
    course: Course

    @property
    def cases(self) -> list[Case]:
        return list(self.results)

    def label(self, case: Case) -> str:
        """With the size, where cases have different ones."""
        several = len({one.size for one in self.cases if one.size is not None}) > 1
        return f"{case.label} {case.size:,}" if several and case.size is not None else case.label

    @property
    def texts(self) -> int:
        return len(next(iter(self.results.values())))

    @property
    def ends(self) -> list[int]:
        """Tokens up to the end of each window."""
        count = len(self.course.counts)
        return [min((i + 1) * self.course.window, self.course.tokens) for i in range(count)]

    @property
    def columns(self) -> list[int]:
        """The windows that the tables show: the first, each that ends at twice as many tokens, the last."""
        count = len(self.course.counts)
        return [*(2**i - 1 for i in range(count.bit_length()) if 2**i < count), count - 1]

    @cached_property
    def so_far(self) -> dict[Case, list[Estimate]]:
        """Perplexity of all tokens up to the end of each window."""
        counts = list(accumulate(self.course.counts))
        sums = {case: [list(accumulate(nll)) for nll in texts] for case, texts in self.results.items()}
        return {case: self._perplexities(texts, counts) for case, texts in sums.items()}

    @cached_property
    def windows(self) -> dict[Case, list[Estimate]]:
        """Perplexity of each window alone."""
        return {case: self._perplexities(texts, self.course.counts) for case, texts in self.results.items()}

    def _perplexities(self, sums: list[list[float]], counts: list[int]) -> list[Estimate]:
        by_window = zip(*sums, strict=True)
        return [statistics.perplexity(nll, [count] * len(nll)) for nll, count in zip(by_window, counts, strict=True)]

    def tables(self, title: str) -> list[Table]:
        header = ["policy@positions", *(f"{self.ends[i]:,}" for i in self.columns)]
        last = f"perplexity of the last {self.course.window:,} tokens alone"
        note = f"The same of the last {self.course.window:,} tokens alone."
        return [
            Table(
                NAME, f"perplexity of all tokens so far: {title}", "", header, self._rows(self.so_far), self._lines()
            ),
            Table("", last, note, header, self._rows(self.windows)),
        ]

    def _rows(self, estimates: dict[Case, list[Estimate]]) -> list[list[Any]]:
        return [[self.label(case), *(formatted(estimates[case][i]) for i in self.columns)] for case in self.cases]

    def _lines(self) -> list[Sequence[Any]]:
        """A line for each window of each case."""
        lines: list[Sequence[Any]] = [COLUMNS]
        for case in self.cases:
            for end, so_far, window in zip(self.ends, self.so_far[case], self.windows[case], strict=True):
                lines.append([case.policy, case.positions, case.size, end, *so_far, *window, self.texts])
        return lines

    def markdown(self, title: str, facts: dict[str, Any]) -> str:
        about = f"{title}. Perplexity of all tokens so far, and its 95 % interval over texts."
        return document("Extrapolation", about, self.tables(title), facts)


def figure(report: Report, folder: Path, title: str, trained: int | None) -> None:
    """extrapolation.png and .svg: perplexity over tokens read; the dashed line is the training length."""
    with saved_figure(folder, NAME, 2, 13) as (whole, (left, right)):
        for axes, estimates in ((left, report.so_far), (right, report.windows)):
            for case, points in estimates.items():
                plot_estimates(axes, report.ends, points, linewidth=1.2, label=report.label(case))
            if trained and trained < report.course.tokens:
                axes.axvline(trained, color="black", linestyle="--", linewidth=1)
            _scales(axes)
        left.set_ylabel("perplexity of all tokens so far")
        right.set_ylabel(f"perplexity of each {report.course.window:,} tokens")
        left.legend(frameon=False)
        whole.suptitle(title, fontsize=10)


def _scales(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, ScalarFormatter

    axes.set_yscale("log")  # perplexities differ by orders of magnitude where a method fails
    for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        set_formatter(ScalarFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens:,.0f}"))
    axes.set_xlabel("tokens read")
