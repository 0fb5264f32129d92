"""Retrieval by policy and size: which facts of a long text a bounded state can still tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from msrnn.engine.engine import Engine
from msrnn.engine.requests import SamplingParams
from msrnn.evaluation import statistics
from msrnn.evaluation.cells import Cell
from msrnn.evaluation.data.needles import FIRST, LAST, TASKS, Asked, score
from msrnn.evaluation.environment import backend_names, model_key
from msrnn.evaluation.generation import answer_in_batches, answer_prompts
from msrnn.evaluation.report import Formatted, Share, Table, document, save_figure
from msrnn.evaluation.schemas import Schema, Text, check_of
from msrnn.evaluation.store import Record
from msrnn.evaluation.task import Compute, Job, OnTokens, Task
from msrnn.hf.rnn import MultiStateRNN
from msrnn.hf.stop_tokens import stop_tokens_of
from msrnn.policy import FULL

NAME = "retrieval"


class AnswerSchema(Schema):
    policy: Text
    size: int | None
    question: Text
    item: Text
    task: Text
    length: int
    depth: float
    answer: Text
    expected: list[Text]
    fingerprint: Text
    dtype: Text
    positions: Text


CHECK = check_of(AnswerSchema)
FULL_BLOCK = 4096  # tokens: the full model reads a long prompt in few and large steps
PLACE = {FIRST: "question first", LAST: "question last"}


class Case(NamedTuple):
    """A policy and a size, and where the question is."""

    policy: str
    size: int | None  # None: full, which has no limit
    place: str

    @property
    def cell(self) -> Cell:
        return Cell(self.policy, self.size)

    @property
    def label(self) -> str:
        return f"{self.cell.label}, {PLACE[self.place]}"

    @property
    def key(self) -> Record:
        return {**self.cell.key, "question": self.place}


Results = dict[Case, list[float]]  # the score of each question


class Retrieval(Task[Case, str, float]):
    """One model on questions, each identified by its prompt. An answer is greedy."""

    unit = "answers"
    gpu_batch, cpu_batch = 16, 8

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, asked: Sequence[Asked], positions: str, metadata: Record
    ) -> None:
        self.stop_tokens = sorted(stop_tokens_of(model, tokenizer))
        self.key = {**model_key(model), "stop_tokens": self.stop_tokens, "positions": positions}
        self.metadata, self.tokenizer, self.positions = metadata, tokenizer, positions
        self.asked: dict[str, dict[str, Asked]] = {FIRST: {}, LAST: {}}  # by place, and by what identifies it
        for one in asked:
            self.asked[one.place][f"{one.prompt.key}-{TASKS[one.sample.task].tokens}"] = one

    def cell_of(self, record: Record) -> Case:
        return Case(record["policy"], record["size"], record["question"])

    def items(self, cell: Case) -> list[str]:
        return list(self.asked[cell.place])

    def read(self, records: list[Record]) -> dict[str, float]:
        return {record["item"]: score(record["answer"], record["expected"]) for record in records}

    def work(self, job: Job[Case, str]) -> int:
        asked = [self.asked[job.cell.place][item] for item in job.items]
        return sum(len(one.prompt.ids) + TASKS[one.sample.task].tokens for one in asked)

    def batches(self, job: Job[Case, str]) -> list[list[str]]:
        """All prompts of one length at once, so that little is padded."""
        lengths: dict[int, list[str]] = {}
        for item in job.items:
            lengths.setdefault(self.asked[job.cell.place][item].sample.length, []).append(item)
        return [lengths[length] for length in sorted(lengths)]

    def prepare(self, job: Job[Case, str], model: PreTrainedModel) -> Compute[str]:
        every = self.asked[job.cell.place]

        def compute(some: list[str], on_tokens: OnTokens) -> Iterator[Record]:
            asked = [every[item] for item in some]
            rnn = self._rnn(job.cell, model)
            prompts = [one.prompt.ids for one in asked]
            params = [self._params(one) for one in asked]
            answers = (
                answer_in_batches(rnn, prompts, params, job.batch, on_tokens)
                if job.cell.size is None
                else answer_prompts(Engine.offline(rnn, job.batch), prompts, params, on_tokens)
            )
            for number, tokens, seconds in answers:
                text = self.tokenizer.decode(tokens, skip_special_tokens=True)
                found = {"item": some[number], **asked[number].sample._asdict(), "tokens": len(prompts[number])}
                said = {"answer": text, "expected": asked[number].answers, "seconds": seconds}
                yield {**found, **said, "backend": backend_names(rnn)}

        return compute

    def _params(self, asked: Asked) -> SamplingParams:
        return SamplingParams(
            max_tokens=TASKS[asked.sample.task].tokens,
            temperature=0,
            stop_token_ids=self.stop_tokens,
            ignore_eos=True,  # the stop tokens are all of them
        )

    def _rnn(self, case: Case, model: PreTrainedModel) -> MultiStateRNN:
        if case.size is None:
            return MultiStateRNN(model, FULL, None, block=FULL_BLOCK)
        return MultiStateRNN(model, **case.cell.options, positions=self.positions)


@dataclass(frozen=True)
class Report:
    """Shares of the answers that are right."""

    results: Results
    asked: dict[str, dict[str, Asked]]

    @cached_property
    def places(self) -> list[str]:
        return list(dict.fromkeys(case.place for case in self.results))

    @cached_property
    def cells(self) -> list[Cell]:
        return list(dict.fromkeys(case.cell for case in self.results))

    def values(self, part: Callable[[Asked], Any]) -> list[Any]:
        """The values of a property of the questions, such as their length."""
        return sorted({part(one) for every in self.asked.values() for one in every.values()})

    def accuracy(self, cell: Cell, place: str, where: Callable[[Asked], bool] = lambda _: True) -> Formatted | None:
        """Of the questions for which `where` holds."""
        found = self._scores(cell, place, where)
        return Formatted(statistics.mean(found, [1] * len(found)), "{:.0%}".format) if found else None

    def _scores(self, cell: Cell, place: str, where: Callable[[Asked], bool]) -> list[float]:
        scores = self.results.get(Case(*cell, place), [])
        return [value for value, one in zip(scores, self.asked[place].values(), strict=False) if where(one)]

    def tables(self, title: str) -> list[Table]:
        parts: dict[str, Callable[[Asked], Any]] = {
            "tokens": lambda one: one.sample.length,
            "depth": lambda one: one.sample.depth,
            "task": lambda one: one.sample.task,
        }
        tables: list[Table] = []
        for place in self.places:
            for name, part in parts.items():
                values = self.values(part)
                header = [name, *(_format_value(value) for value in values), "all"]
                rows = [
                    [
                        cell.label,
                        *(self.accuracy(cell, place, partial(_has, part, value)) for value in values),
                        self.accuracy(cell, place),
                    ]
                    for cell in self.cells
                    if Case(*cell, place) in self.results
                ]
                first = not tables
                about = f"right answers by {name}, {PLACE[place]}" + (f": {title}" if first else "")
                lines = self._lines() if first else None
                tables.append(
                    Table(NAME if first else "", about, f"{about[0].upper()}{about[1:]}.", header, rows, lines)
                )
        return tables

    def _lines(self) -> list[Sequence[Any]]:
        lines: list[Sequence[Any]] = [
            ["question", "policy", "size", "task", "length", "depth", "accuracy", "questions"]
        ]
        for case, scores in self.results.items():
            groups: dict[tuple[Any, ...], list[float]] = {}
            for value, one in zip(scores, self.asked[case.place].values(), strict=True):
                groups.setdefault(one.sample[:3], []).append(value)
            for (task, length, depth), found in groups.items():
                share = sum(found) / len(found)
                lines.append([case.place, case.policy, case.size, task, length, depth, share, len(found)])
        return lines

    def markdown(self, title: str, facts: dict[str, Any]) -> str:
        about = (
            f"{title}. The share of the expected answers that occur in the reply, and its 95 % interval, by bootstrap "
            "over the questions. Depth: where in the text the fact is, from 0 (its beginning) to 1 (its end)."
        )
        return document("Retrieval", about, self.tables(title), facts)


def _has(part: Callable[[Asked], Any], value: Any, one: Asked) -> bool:
    return bool(part(one) == value)


def _format_value(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{Share(value):.0%}" if isinstance(value, float) else value


def figure(report: Report, folder: Path, title: str) -> None:
    """retrieval.png and .svg: depth over length, one heatmap for each version and place of the question."""
    lengths = report.values(lambda one: one.sample.length)
    depths = report.values(lambda one: one.sample.depth)
    columns, rows = len(report.cells), len(report.places)
    width, height = 1.6 + columns * max(1.8, 0.55 * len(lengths) + 0.8), 0.8 + rows * (0.9 + 0.32 * len(depths))
    with save_figure(folder, NAME, columns, width, rows, height) as (whole, panels):
        places = iter(panels)
        for place in report.places:
            for cell in report.cells:
                axes = next(places)
                shares = [[_share(report, cell, place, length, depth) for length in lengths] for depth in depths]
                image = axes.imshow(shares, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
                axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45, fontsize=7)
                axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=7)
                axes.set_title(f"{cell.label}\n{PLACE[place]}", fontsize=8)
                for number, line in ((len(lengths), axes.axvline), (len(depths), axes.axhline)):
                    for i in range(1, number):
                        line(i - 0.5, color="white", linewidth=1)
        panels[0].set_ylabel("depth")
        panels[-columns].set_xlabel("tokens")
        whole.colorbar(image, ax=panels, label="right answers", shrink=0.8)
        whole.suptitle(title, fontsize=9)


def _share(report: Report, cell: Cell, place: str, length: int, depth: float) -> float:
    found = report.accuracy(cell, place, lambda one: (one.sample.length, one.sample.depth) == (length, depth))
    return found.estimate.value if found else float("nan")
