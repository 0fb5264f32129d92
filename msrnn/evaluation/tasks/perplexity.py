"""Perplexity on chunks of text by policy and size: the paper's table of language modelling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.errors import UsageError
from msrnn.evaluation import statistics
from msrnn.evaluation.cells import (
    BASELINE,
    FULL,
    FULL_MODEL,
    FUTURE,
    Cell,
    Grid,
    cell_of,
    check_lists,
    check_row,
    row_name,
)
from msrnn.evaluation.cells import grid as cells_grid
from msrnn.evaluation.data.texts import Data
from msrnn.evaluation.environment import model_identity
from msrnn.evaluation.future import Future
from msrnn.evaluation.future_reader import FutureReader
from msrnn.evaluation.loss import losses
from msrnn.evaluation.report import Formatted, Table, document, plot_estimates, save_figure
from msrnn.evaluation.schemas import ChunkSchema, Text, check_of
from msrnn.evaluation.statistics import Estimate
from msrnn.evaluation.store import Record
from msrnn.evaluation.task import C, Compute, Job, OnTokens, Task
from msrnn.hf.rnn import MultiStateRNN
from msrnn.policy import Policy

NAME = "perplexity"
PAPER_ROWS = (
    *(BASELINE, "window", "window+1", "window+4", "h2o", "h2o-layer"),
    *("tova-head", "tova", "tova+1", "tova+4"),
)
PAPER_SIZES = tuple(2**i for i in range(6, 13))
COLUMNS = (
    *("policy", "size", "perplexity", "low", "high", "nll", "nll_low", "nll_high", "chunks", "tokens"),
    *("against", "difference", "difference_low", "difference_high", "ratio", "ratio_low", "ratio_high"),
)


class LossSchema(ChunkSchema):
    """The mean loss of each chunk."""

    policy: Text
    size: int | None
    nll: list[float]
    fingerprint: Text
    dtype: Text


CHECK = check_of(LossSchema)


def grid(policies: Sequence[str | Policy], sizes: Sequence[int], length: int) -> Grid:
    """A table whose cells can all be computed. Every cell predicts the same tokens."""
    check_lists(policies, sizes)
    for name in policies:
        for size in sizes:
            if row_name(name) == FUTURE:
                Future(size)
            elif name != BASELINE:
                check_row(name, size)
            elif size < 2:
                raise UsageError(
                    "a piece of the baseline must have 2 tokens or more, to predict one", name="size", value=size
                )
    return cells_grid(policies, sizes, length)


class ChunkReader(Protocol):
    """What reads the chunks of a cell."""

    def nll(self, input_ids: Tensor, on_tokens: OnTokens | None = None) -> list[float]:
        """Chunks [B, T] -> the negative log-likelihood of each, summed over its predicted tokens."""
        ...


class Reader:
    """Reads chunks. `opening`: tokens in front of every chunk; `piece`: it reads pieces of this many tokens."""

    def __init__(self, rnn: MultiStateRNN, opening: int, piece: int | None = None) -> None:
        self.rnn, self.opening, self.piece = rnn, opening, piece

    def nll(self, input_ids: Tensor, on_tokens: OnTokens | None = None) -> list[float]:
        """Chunks [B, T] -> the negative log-likelihood of each, summed over its predicted tokens."""
        total = torch.zeros(len(input_ids), dtype=torch.float64)
        for ids in self._batches(input_ids):
            on_block = partial(_count, len(ids), on_tokens) if on_tokens else None
            predicted = losses(self.rnn, ids, self.rnn.state(len(ids)), on_block)[:, max(1, self.opening) - 1 :]
            total += predicted.cpu().double().sum(-1).view(-1, len(total)).sum(0)
        return total.tolist()

    def _batches(self, input_ids: Tensor) -> list[Tensor]:
        """Rows of equal length: the chunks, or pieces of them, as many as make a block."""
        if self.piece is None:
            return [input_ids]
        cut = pieces(input_ids, self.piece, self.opening)
        whole, last = cut[:-1], cut[-1]
        together = max(1, self.rnn.block // self.piece)
        return [*(torch.cat(whole[i : i + together]) for i in range(0, len(whole), together)), last]


def _count(rows: int, on_tokens: OnTokens, columns: int) -> None:
    on_tokens(rows * columns)


def pieces(input_ids: Tensor, size: int, opening: int) -> list[Tensor]:
    """Chunks [B, T] as pieces [B, t] of at most `size` tokens, which together predict the tokens of the chunk.

    Each piece begins with the opening of the chunk. Without an opening, it begins with the last token before it.
    """
    given = max(1, opening)
    if size <= given:
        raise UsageError(
            f"a piece of the baseline has {given} given tokens and must predict one more", name="size", value=size
        )
    cut = []
    for start in range(given, input_ids.shape[1], size - given):
        front = input_ids[:, :opening] if opening else input_ids[:, start - 1 : start]
        cut.append(torch.cat([front, input_ids[:, start : start + size - given]], dim=1))
    return cut


Results = dict[Cell, list[float]]  # the summed negative log-likelihood of each chunk


class ChunkLosses(Task[C, str, float]):
    """The loss of a model on chunks, identified by their content: another choice reuses the chunks it shares.

    reader_of  what reads the chunks of a cell
    cell_of    the cell of a record
    """

    unit = "chunks"
    gpu_batch = 64  # the eviction scan runs one chunk per multiprocessor, all in parallel

    def __init__(
        self,
        model: PreTrainedModel,
        data: Data,
        metadata: Record,
        reader_of: Callable[[PreTrainedModel, C, int], ChunkReader],
        cell_of: Callable[[Record], C],
    ) -> None:
        self.key = model_identity(model)
        backend = self.key.pop("backend")
        self.metadata = {"length": data.length, "data": data.fingerprint, "backend": backend, **metadata}
        self.data, self._reader_of, self._cell_of = data, reader_of, cell_of
        self.chunks = dict(zip(data.keys, data.chunks, strict=True))

    def cell_of(self, record: Record) -> C:
        return self._cell_of(record)

    def items(self, cell: C) -> list[str]:
        return self.data.keys

    def read(self, records: list[Record]) -> dict[str, float]:
        return {key: nll for record in records for key, nll in zip(record["chunks"], record["nll"], strict=True)}

    def work(self, job: Job[C, str]) -> int:
        return len(job.items) * self.data.predicted

    def prepare(self, job: Job[C, str], model: PreTrainedModel) -> Compute[str]:
        reader = self._reader_of(model, job.cell, len(self.data.opening))

        def compute(keys: list[str], on_tokens: OnTokens) -> Iterator[Record]:
            began, chunks = perf_counter(), [self.chunks[key] for key in keys]
            nll = reader.nll(torch.tensor([chunk.ids for chunk in chunks]), on_tokens)
            source = {"chunks": keys, "texts": [[chunk.book, chunk.start] for chunk in chunks]}
            yield {**source, "tokens": self.data.predicted, "nll": nll, "seconds": perf_counter() - began}

        return compute


def perplexity_task(model: PreTrainedModel, data: Data, metadata: Record) -> ChunkLosses[Cell]:
    """Each cell is a policy at a size."""
    return ChunkLosses(model, data, metadata, cell_reader, cell_of)


def cell_reader(model: PreTrainedModel, cell: Cell, opening: int) -> ChunkReader:
    if cell.future is not None:
        return FutureReader(model, cell.future, opening)
    return Reader(MultiStateRNN(model, **cell.options), opening, cell.size if cell.policy == BASELINE else None)


@dataclass(frozen=True)
class Report:
    """Perplexities, and differences between policies on the same chunks."""

    grid: Grid
    results: Results
    predicted: int  # tokens of each chunk
    against: str  # the policy that others are compared with, at the same size

    def nll(self, name: str, size: int) -> Estimate:
        """Nats per token."""
        return self._nll[self.grid.at(name, size)]

    def perplexity(self, name: str, size: int) -> Estimate:
        return self.nll(name, size).exp()

    def difference(self, name: str, size: int) -> Estimate | None:
        """Nats per token more than the policy compared with; None: it is the same cell."""
        return self._differences.get((self.grid.at(name, size), self.grid.at(self.against, size)))

    @cached_property
    def _nll(self) -> dict[Cell, Estimate]:
        return {cell: statistics.mean(sums, self._counts) for cell, sums in self.results.items()}

    @cached_property
    def _differences(self) -> dict[tuple[Cell, Cell], Estimate]:
        return {
            (cell, other): statistics.difference(self.results[cell], self.results[other], self._counts)
            for cell, other in self.grid.pairs_with(self.against)
        }

    @property
    def _counts(self) -> list[int]:
        return [self.predicted] * len(next(iter(self.results.values())))

    @cached_property
    def distances(self) -> dict[str, list[float]]:
        """Percents above the full model, for each policy; empty without the full model, or where nothing is above it.

        A logarithmic axis cannot show values of 0 or less: they are NaN.
        """
        if FULL_MODEL not in self.results:
            return {}
        least, names = self._nll[FULL_MODEL].value, [name for name in self.grid.policies if name != FULL]
        percents = {
            name: [100 * math.expm1(self.nll(name, size).value - least) for size in self.grid.sizes_of(name)]
            for name in names
        }
        positive = {name: [x if x > 0 else math.nan for x in values] for name, values in percents.items()}
        return positive if any(x > 0 for values in percents.values() for x in values) else {}

    def tables(self, title: str) -> list[Table]:
        """The perplexities; and the difference of each policy to the one compared with, in percent."""
        rows = self.grid.rows(self.grid.policies, lambda name, size: format_perplexity(self.perplexity(name, size)))
        lines = [COLUMNS, *(self._line(name, size) for name, size in self.grid.places)]
        tables = [Table(NAME, f"perplexity of {title}", "", self.grid.header, rows, lines)]
        if compared := self.grid.find_comparable(self.against):
            against = f"perplexity against {self.against} at the same size, on the same chunks"
            tables.append(Table("", against, "", self.grid.header, self.grid.rows(compared, self._ratio)))
        return tables

    def _ratio(self, name: str, size: int) -> Formatted | None:
        difference = self.difference(name, size)
        return format_ratio(difference) if difference else None

    def _nats_and_ratio(self, name: str, size: int) -> str | None:
        difference = self.difference(name, size)
        return f"{difference.value:+.4f}, {format_ratio(difference).text(' · ')}" if difference else None

    def markdown(self, title: str, facts: dict[str, Any]) -> str:
        first, *differences = self.tables(title)
        about = f"{title}. Beside each value its 95 % interval, by bootstrap over the chunks."
        note = f"Against {self.against} at the same size, on the same chunks: nats per token, and perplexity."
        rows = self.grid.rows(self.grid.find_comparable(self.against), self._nats_and_ratio)
        return document("Perplexity", about, [first, *(t._replace(note=note, rows=rows) for t in differences)], facts)

    def _line(self, name: str, size: int) -> list[object]:
        nll, difference = self.nll(name, size), self.difference(name, size)
        compared = [self.against, *difference, *difference.exp()] if difference else [""] * 7
        chunks = len(self.results[self.grid.at(name, size)])
        return [name, size, *nll.exp(), *nll, chunks, chunks * self.predicted, *compared]


def format_perplexity(perplexity: Estimate) -> Formatted:
    return Formatted(perplexity, _number, "–")  # noqa: RUF001


def _number(value: float) -> str:
    """Four digits or more."""
    return f"{value:,.{2 if value < 100 else 1 if value < 1000 else 0}f}"


def format_ratio(difference: Estimate) -> Formatted:
    """A difference in nats as the change of the perplexity, in percent."""
    return Formatted(difference.exp(), lambda x: f"{x - 1:+.1%}")


def figure(report: Report, folder: Path, title: str) -> None:
    """perplexity.png and .svg: perplexity over size, the full model dashed; and how far each policy is from it."""
    distances, sizes_of = report.distances, report.grid.sizes_of
    with save_figure(folder, NAME, 2 if distances else 1, 11 if distances else 7.5) as (whole, panels):
        for name in report.grid.policies:
            if name != FULL:
                values = [report.perplexity(name, size) for size in sizes_of(name)]
                plot_estimates(panels[0], sizes_of(name), values, label=name, **_style(name))
        if FULL in report.grid.policies:
            value = report.perplexity(FULL, report.grid.sizes[0]).value
            panels[0].axhline(value, color="black", linestyle="--", linewidth=1, label=FULL)
        panels[0].set_ylabel("perplexity")
        panels[0].legend(frameon=False, fontsize=8)
        for name, percents in distances.items():
            panels[1].plot(sizes_of(name), percents, **_style(name))
            panels[1].set_ylabel("perplexity above the full model's, %")
        for axes in panels:
            _scales(axes, report.grid.sizes)
        whole.suptitle(title, fontsize=10)


def _style(name: str) -> dict[str, Any]:
    return {"marker": "o", "markersize": 3, **({"color": "gray", "linestyle": ":"} if name == BASELINE else {})}


def _scales(axes: Any, sizes: Sequence[int]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("size: KV rows per layer")
