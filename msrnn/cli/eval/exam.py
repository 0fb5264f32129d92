"""A task's questions, the exam that a model sits, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrnn.cli.eval.common import check_positions
from msrnn.cli.eval.terminal import watched
from msrnn.cli.options import ORIGINAL
from msrnn.cli.results import drawn, shown_as_well, written
from msrnn.cli.terminal import note, progress, show_table
from msrnn.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from msrnn.evaluation.cells import Cell, Grid
    from msrnn.evaluation.store import Store
    from msrnn.evaluation.understanding.questions import Question
    from msrnn.evaluation.understanding.records import Exam, Records
    from msrnn.evaluation.understanding.report import Report
    from msrnn.evaluation.understanding.scores import Scores
    from msrnn.evaluation.understanding.tasks import Task
    from msrnn.hf.loading import Loaded

AUTO = "auto"


def sourced(task: Task, data: Path | None, split: str, limit: int | None, seed: int) -> list[Question]:
    from msrnn.evaluation.understanding.sources import questions

    found = questions(data, split, task.hub, task.forms, limit, seed)
    note(found.told())
    return found.questions


def examined(
    task: Task, model: PreTrainedModel, chat: bool, length: int, answer: int, positions: str, cells: Sequence[Cell]
) -> Exam:
    """What is computed, and whether it can be: refused before anything is."""
    from msrnn.core.rope import COMPRESSED, name_of, spacing
    from msrnn.evaluation.cells import UNBOUNDED
    from msrnn.evaluation.understanding.records import Exam
    from msrnn.evaluation.understanding.run import fingerprints
    from msrnn.hf.rnn import MultiStateRNN

    config = model.config.get_text_config(decoder=True)
    rotated = getattr(config, "rope_parameters", None)
    check_positions(config, length if rotated else length + answer)  # learned positions end with the answer, too
    known = getattr(config, "max_position_embeddings", None)
    if positions == AUTO:
        positions = COMPRESSED if known and length > known else ORIGINAL
        if positions == COMPRESSED:
            note("so bounded states have compressed positions; --positions original leaves them as they are")
    placed = name_of(spacing(positions))
    for cell in cells:
        if cell.policy not in UNBOUNDED:
            MultiStateRNN(model, cell.policy, cell.size, positions=positions)
            break
    return Exam(task.name, **fingerprints(model), chat=chat, length=length, positions=placed, answer=answer)


def answered(
    task: Task,
    loaded: Loaded,
    exam: Exam,
    found: list[Question],
    store: Store,
    batch: int | None,
    cells: list[Cell],
    told: dict[str, Any],
) -> Records:
    from msrnn.evaluation.setting import setting
    from msrnn.evaluation.understanding.asking import Asker
    from msrnn.evaluation.understanding.records import Records
    from msrnn.evaluation.understanding.run import Run

    batch = batch or (16 if loaded.model.device.type == "cuda" else 8)
    asker = Asker(loaded.tokenizer, task.prompt, exam.chat)
    beside = {**told, "batch": batch, **setting(loaded.model.device)}
    records: Records = watched(Run(loaded.model, asker, found, Records(store, exam), batch, beside), cells)
    return records


def wanted(length: int | None, chat: bool | None, answer: int | None, positions: str) -> dict[str, Any]:
    """What an exam must have to be meant. What `auto` comes to is the model's to say, so it leaves positions open."""
    from msrnn.core.rope import name_of, spacing

    placed = None if positions == AUTO else name_of(spacing(positions))
    given = {"length": length, "chat": chat, "answer": answer, "positions": placed}
    return {name: value for name, value in given.items() if value is not None}


def stored(task: Task, store: Store, cells: list[Cell], meant: dict[str, Any]) -> tuple[Records, list[str]]:
    """Of the exam that was last sat and is meant: questions that all cells have answered."""
    from msrnn.evaluation.understanding.records import Exam, Records

    records = Records(store, Exam.last(store, task.name, **meant))
    keys = records.complete(cells)
    if not keys:
        missing = ", ".join(cell.label for cell in cells if not records.complete([cell]))
        raise UsageError(f"{store.path}: no question that all have answered ({missing} none); answer, or ask for less")
    note(f"{len(keys):,} of {len(records.asked):,} questions have been answered by all")
    return records, keys


def finish(task: Task, grid: Grid, records: Records, keys: list[str], against: str, folder: Path) -> None:
    from msrnn.evaluation.understanding.report import Report, shown

    others = records.others(grid.cells, keys)
    shown_as_well([cell.label for cell in others], 0)
    grid = grid.beside(others)
    report = Report(task, grid, records, keys, against, scored(task, grid, records, keys))
    told = {**records.exam.key, **records.told(grid.cells[0], keys[0])}
    title = f"{told['model']}, {task.title}, {len(keys):,} questions, prompts of {records.exam.length:,} tokens"
    show_table(f"{task.metric.name}: {title}", report.grid.headers, report.table(shown))
    if report.compared:
        title_ = f"points against {against} at the same size, on the same questions"
        show_table(title_, report.grid.headers, report.differences(lambda x: shown(x, sign="+")))
    note(report.told())
    write(report, folder, title, {name: str(value) for name, value in told.items()})


def scored(task: Task, grid: Grid, records: Records, keys: list[str]) -> Scores:
    """With a bar, since ROUGE takes its time."""
    from msrnn.evaluation.understanding.scores import scores

    with progress("answers") as bar:
        line = bar.add_task("scoring", total=None)
        return scores(
            task.metric,
            records,
            grid.cells,
            keys,
            on_total=lambda answers: bar.update(line, total=answers),
            on_score=lambda: bar.advance(line),
        )


def write(report: Report, folder: Path, title: str, told: dict[str, str]) -> None:
    from msrnn.evaluation.understanding.figure import figure
    from msrnn.evaluation.understanding.report import as_csv, markdown

    name = report.task.name
    (folder / f"{name}.md").write_text(markdown(report, title, told))
    (folder / f"{name}.csv").write_text(as_csv(report))
    written(folder, name, ("jsonl", "md", "csv", *drawn(lambda: figure(report, folder, title))))
