"""Answers to questions on long documents by policy and size: the paper's SQuALITY and QASPER."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from msrnn.core.rope import COMPRESSED, ORIGINAL, name_of, spacing
from msrnn.engine.engine import Engine
from msrnn.engine.offline import full_model_rnn
from msrnn.engine.requests import SamplingParams
from msrnn.errors import FileError
from msrnn.evaluation import statistics
from msrnn.evaluation.cells import FULL, TRUNCATED, UNBOUNDED, Cell, Grid, cell_of
from msrnn.evaluation.data import prompts
from msrnn.evaluation.data.prompts import Prompt, PromptBuilder
from msrnn.evaluation.data.questions import (
    QASPER_FORMATS,
    QASPER_HUB,
    SQUALITY_FORMATS,
    SQUALITY_HUB,
    Format,
    Hub,
    Question,
)
from msrnn.evaluation.environment import backend_names, model_key
from msrnn.evaluation.generation import answer_prompts
from msrnn.evaluation.report import INLINE, MISSING, Formatted, Table, document, plot_estimates, saved_figure
from msrnn.evaluation.runner import Progress, Runner, Workers
from msrnn.evaluation.statistics import Estimate
from msrnn.evaluation.store import Record, Store
from msrnn.evaluation.task import Compute, Job, OnTokens, Task
from msrnn.evaluation.tasks.answer_scores import F1, ROUGE, Metric, Scores
from msrnn.evaluation.tasks.answers import Answers, Settings, StoredQuestion
from msrnn.hf.generation import stop_tokens_of
from msrnn.hf.loading import Loaded
from msrnn.hf.rnn import MultiStateRNN

AUTO = "auto"


class QuestionTask(NamedTuple):
    """A set of questions on documents, and how answers are scored."""

    name: str
    title: str
    prompt: str
    answer: int  # tokens of an answer, at most
    hub: Hub
    formats: dict[str, Format]
    metric: Metric


SQUALITY = QuestionTask("squality", "SQuALITY", prompts.SQUALITY, 512, SQUALITY_HUB, SQUALITY_FORMATS, ROUGE)
QASPER = QuestionTask(
    "qasper",
    "QASPER",
    prompts.QASPER,
    128,
    QASPER_HUB,
    QASPER_FORMATS,
    F1,
)
TASKS = {task.name: task for task in (SQUALITY, QASPER)}


def settings_of(
    task: QuestionTask,
    model: PreTrainedModel,
    chat: bool,
    length: int,
    answer: int,
    positions: str,
    cells: Sequence[Cell],
) -> Settings:
    """The settings of a run; refuses what the model cannot compute. Positions "auto" depend on its training length."""
    known = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions == AUTO:
        positions = COMPRESSED if known and length > known else ORIGINAL
    bounded = next((cell for cell in cells if cell.policy not in UNBOUNDED), None)
    if bounded:
        MultiStateRNN(model, *bounded.bounds, positions=positions)
    name = name_of(spacing(positions))
    return Settings(task.name, **model_key(model), chat=chat, length=length, positions=name, answer=answer)


def stored_answers(task: QuestionTask, store: Store, cells: list[Cell], **wanted: Any) -> tuple[Answers, list[str]]:
    """The answers of the last settings with these values (None: any), and the questions that all cells answered."""
    positions = wanted.pop("positions", AUTO)
    wanted["positions"] = None if positions == AUTO else name_of(spacing(positions))
    given = {name: value for name, value in wanted.items() if value is not None}
    answers = Answers(store, Settings.last(store, task.name, **given))
    keys = answers.answered_by(cells)
    if not keys:
        missing = ", ".join(cell.label for cell in cells if not answers.answered_by([cell]))
        raise FileError(
            f"no question that all rows have answered ({missing} none)",
            store.path,
            advice="answer more, or use fewer rows",
        )
    return answers, keys


Assigned = dict[Cell, dict[str, Prompt]]  # the prompts that each cell answers, by key


def assign_prompts(
    builder: PromptBuilder, questions: Sequence[Question], answers: Answers, cells: Sequence[Cell]
) -> Assigned:
    """Each prompt once, however many cells of the table show its answer. Questions are stored with their prompts."""
    lengths = sorted({answers.length(cell) for cell in cells})
    # What set the length of a prompt: the settings, or the size of a truncated row.
    names = {length: "length" if length == answers.settings.length else "size" for length in lengths}
    assigned: Assigned = {}
    for question in questions:
        built = {length: builder.build(question, length, names[length]) for length in lengths}
        answers.store_question(question, built)
        by_key = {prompt.key: prompt for prompt in built.values()}
        for cell in cells:
            source, key = answers.source(cell, answers.questions[question.key])
            assigned.setdefault(source, {})[key] = by_key[key]
    answers.mark_used()
    return {cell: assigned[cell] for cell in sorted(assigned, key=lambda cell: cell.size is not None)}


class Understanding(Task[Cell, str, Record]):
    """One model on some prompts. An item is a prompt, by its key."""

    unit = "answers"
    gpu_batch, cpu_batch = 16, 8

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, prompts: Assigned, settings: Settings, metadata: Record
    ) -> None:
        self.key, self.metadata = settings.answer_key, {"length": settings.length, **metadata}
        self.tokenizer, self.prompts, self.settings = tokenizer, prompts, settings
        self.stop_tokens = stop_tokens_of(model, tokenizer)

    def cell_of(self, record: Record) -> Cell:
        return cell_of(record)

    def items(self, cell: Cell) -> list[str]:
        return list(self.prompts[cell])

    def record_key(self, cell: Cell) -> Record:
        return self.settings.answer_key_of(cell)

    def read(self, records: list[Record]) -> dict[str, Record]:
        return {record["prompt"]: record for record in records if "prediction" in record}

    def work(self, job: Job[Cell, str]) -> int:
        return sum(len(self.prompts[job.cell][key].ids) + self.settings.answer for key in job.items)

    def batches(self, job: Job[Cell, str]) -> list[list[str]]:
        """All at once: the engine keeps its batch filled, and reads a document once for all its questions."""
        return [job.items]

    def prepare(self, job: Job[Cell, str], model: PreTrainedModel) -> Compute[str]:
        ids = {key: self.prompts[job.cell][key].ids for key in job.items}
        rnn = self._rnn(job.cell, model, max(map(len, ids.values())) + self.settings.answer)
        backend = {"backend": backend_names(rnn)}
        params = SamplingParams(
            max_tokens=self.settings.answer,
            temperature=0,
            stop_token_ids=sorted(self.stop_tokens),
            ignore_eos=True,  # the stop tokens are all of them
        )

        def compute(keys: list[str], on_tokens: OnTokens) -> Iterator[Record]:
            prompts = [ids[key] for key in keys]
            for number, answer, seconds in answer_prompts(Engine.offline(rnn, job.batch), prompts, params, on_tokens):
                text = self.tokenizer.decode(answer, skip_special_tokens=True).strip()
                counts = {"tokens": len(prompts[number]), "answer_tokens": len(answer), "seconds": seconds}
                yield {"prompt": keys[number], "prediction": text, **counts, **backend}

        return compute

    def _rnn(self, cell: Cell, model: PreTrainedModel, tokens: int) -> MultiStateRNN:
        if cell.size is None:
            return full_model_rnn(model, tokens)
        return MultiStateRNN(model, *cell.bounds, positions=self.record_key(cell)["positions"])


def answer_questions(
    loaded: Loaded,
    task: QuestionTask,
    questions: Sequence[Question],
    answers: Answers,
    cells: Sequence[Cell],
    metadata: Record,
    batch: int | None = None,
    progress: Progress | None = None,
    workers: Workers | None = None,
) -> Answers:
    """Generate the answers that the store does not have, and read all of them."""
    builder = PromptBuilder(loaded.tokenizer, task.prompt, answers.settings.chat)
    prompts = assign_prompts(builder, questions, answers, cells)
    run = Runner(
        Understanding(loaded.model, loaded.tokenizer, prompts, answers.settings, metadata),
        answers.store,
        loaded.model,
        batch,
        workers,
    )
    run.run(list(prompts), progress or Progress())
    return Answers(answers.store, answers.settings)


@dataclass(frozen=True)
class Report:
    """Scores, and differences between policies, on questions that every cell of the grid has answered."""

    task: QuestionTask
    grid: Grid
    answers: Answers
    keys: list[str]  # of the questions
    against: str  # the policy that others are compared with, at the same size
    scores: Scores

    @cached_property
    def questions(self) -> list[StoredQuestion]:
        return [self.answers.questions[key] for key in self.keys]

    def _columns(self, cell: Cell) -> list[list[float]]:
        """For each document, the sums of each part over its questions; and last, the number of questions."""
        documents: dict[str, list[list[float]]] = {}
        for question, score in zip(self.questions, self.scores[cell], strict=True):
            documents.setdefault(question.document, []).append([*score.values, 1.0])
        sums = [[sum(part) for part in zip(*scores, strict=True)] for scores in documents.values()]
        return [list(column) for column in zip(*sums, strict=True)]

    def _overall(self, sums: Sequence[Any]) -> Any:
        return self.task.metric.overall([total / sums[-1] for total in sums[:-1]])

    @cached_property
    def _estimates(self) -> dict[Cell, Estimate]:
        return {cell: statistics.bootstrap(self._columns(cell), self._overall) for cell in self.grid.cells}

    def score(self, name: str, size: int) -> Estimate:
        return self._estimates[self.grid.at(name, size)]

    def parts(self, name: str, size: int) -> list[float]:
        *sums, counts = self._columns(self.grid.at(name, size))
        return [sum(column) / sum(counts) for column in sums]

    def difference(self, name: str, size: int) -> Estimate | None:
        """Points more than the policy compared with; None: it is the same cell."""
        return self._differences.get((self.grid.at(name, size), self.grid.at(self.against, size)))

    @cached_property
    def _differences(self) -> dict[tuple[Cell, Cell], Estimate]:
        width = len(self.task.metric.parts) + 1

        def points(sums: Sequence[Any]) -> Any:
            return self._overall(sums[:width]) - self._overall(sums[width:])

        return {
            (cell, other): statistics.bootstrap([*self._columns(cell), *self._columns(other)], points)
            for cell, other in self.grid.pairs_with(self.against)
        }

    def kinds(self, name: str, size: int) -> dict[str, list[float]]:
        """The first part of each score, by the kind of the best reference."""
        by_kind: dict[str, list[float]] = {}
        for score in self.scores[self.grid.at(name, size)]:
            if score.kind:
                by_kind.setdefault(score.kind, []).append(score.values[0])
        return by_kind

    def summary(self) -> str:
        """The number of questions, and how much of their documents was read."""
        entries = [question.prompts[self.answers.settings.length] for question in self.questions]
        tokens, cut = sum(entry[1] for entry in entries), sum(entry[2] for entry in entries)
        shorter = sum(entry[2] > 0 for entry in entries)
        return (
            f"{len(self.questions):,} on {len({question.document for question in self.questions}):,} documents; "
            f"prompts of {tokens / len(entries):,.0f} tokens on average; "
            f"{cut / len(entries):,.0f} tokens of the document cut on average, in {shorter:,} of them"
        )

    def tables(self, title: str) -> list[Table]:
        """The scores; and the difference of each policy to the one compared with."""
        grid = self.grid
        rows = grid.rows(grid.policies, lambda name, size: formatted(self.score(name, size)))
        tables = [Table(self.task.name, f"{self.task.metric.name}: {title}", "", grid.header, rows, self._lines())]
        if compared := grid.compared_with(self.against):
            against = f"points against {self.against} at the same size, on the same questions"
            note = f"{against[0].upper()}{against[1:]}."
            tables.append(Table("", against, note, grid.header, grid.rows(compared, self._points)))
        return tables

    def _points(self, name: str, size: int) -> Formatted | None:
        difference = self.difference(name, size)
        return formatted(difference, "+") if difference else None

    def _lines(self) -> list[Sequence[Any]]:
        names = "policy", "size", "score", "low", "high", *self.task.metric.parts, "questions"
        lines: list[Sequence[Any]] = [[*names, "against", "difference", "difference_low", "difference_high"]]
        for name, size in self.grid.places:
            difference = self.difference(name, size)
            compared = [self.against, *difference] if difference else [""] * 4
            scores = [*self.score(name, size), *self.parts(name, size)]
            lines.append([name, size, *scores, len(self.questions), *compared])
        return lines

    def _kind_table(self) -> list[Table]:
        """Scores by kind, if references have kinds."""
        kinds = sorted({kind for place in self.grid.places for kind in self.kinds(*place)})
        rows = {}
        for name, size in self.grid.places:
            scores = self.kinds(name, size)
            values = [
                f"{sum(x) / len(x):.2f}{INLINE}{len(x)}" if (x := scores.get(kind)) else MISSING for kind in kinds
            ]
            rows[self.grid.at(name, size).label] = values
        note = "By the kind of the best reference, and how many answers these are."
        table = Table("", "", note, ["", *kinds], [[label, *values] for label, values in rows.items()])
        return [table] if kinds else []

    def markdown(self, title: str, facts: dict[str, Any]) -> str:
        name = self.task.metric.name
        about = f"{title}. {name}; beside each value its 95 % interval, by bootstrap over the documents."
        tables = [*self.tables(title), *self._kind_table()]
        return document(self.task.title, about, tables, {"questions": self.summary(), **facts})


def formatted(estimate: Estimate, sign: str = "") -> Formatted:
    return Formatted(estimate, lambda x: f"{x:{sign}.2f}")


def figure(report: Report, folder: Path, title: str) -> None:
    """TASK.png and .svg: score over size, a line for each policy; the full model is dashed."""
    with saved_figure(folder, report.task.name, 1, 7.5) as (_, (axes,)):
        for name in report.grid.policies:
            sizes = report.grid.sizes_of(name)
            points = [report.score(name, size) for size in sizes]
            if name == FULL:
                axes.axhline(points[0].value, color="black", linestyle="--", linewidth=1, label=FULL)
                continue
            style = {"color": "gray", "linestyle": ":"} if name == TRUNCATED else {}
            plot_estimates(axes, sizes, points, marker="o", markersize=3, label=name, **style)
        axes.set_xscale("log", base=2)
        axes.set_xticks(report.grid.sizes, [f"{size:,}" for size in report.grid.sizes])
        axes.set_xlabel("size: KV rows per layer")
        axes.set_ylabel(report.task.metric.name)
        axes.legend(frameon=False, fontsize=8)
        axes.set_title(title, fontsize=10)
