from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from msrnn.cli.eval.perplexity import Against, Anew, Paper, Policies, check_counts, check_positions, compared, quiet
from msrnn.cli.eval.terminal import show_table, watched
from msrnn.cli.options import ORIGINAL, SMALL, Device, Dtype, Model
from msrnn.cli.results import rows_file
from msrnn.cli.terminal import note
from msrnn.policy import FULL, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from msrnn.evaluate.cells import Cell, Grid
    from msrnn.evaluate.store import Store
    from msrnn.evaluate.understanding.records import Exam, Records
    from msrnn.evaluate.understanding.report import Report
    from msrnn.evaluate.understanding.tasks import Task

ROWS, SIZES, PAPER_SIZES = ("tova", "window+4", "truncated", FULL), (512,), (256, 512, 1024, 2048, 4096)
KINDS = ("jsonl", "md", "csv", "png", "svg")
AUTO = "auto"


class Stage(StrEnum):
    ALL = "all"
    ANSWER = "answer"
    SCORE = "score"


Data = Annotated[Path | None, Option(help="A .jsonl or .json file in the original form.", show_default="the hub's")]
Split = Annotated[str, Option(help="Of the hub's dataset.")]
Sizes = Annotated[
    list[int] | None,
    Option("--size", help="A column: states, or tokens of truncated; repeat for more.", show_default="512"),
]
Length = Annotated[int, Option(help="Tokens that a prompt may have; the document's end is cut.")]
Chat = Annotated[
    bool | None,
    Option("--chat/--no-chat", help="Ask by the chat template, or with the bare text.", show_default="chat if any"),
]
Answer = Annotated[int | None, Option("--max-new-tokens", help="Tokens of an answer, at most.", show_default=False)]
Positions = Annotated[
    str,
    Option(help="Where kept tokens stand: original, compressed, compact; auto: compressed past the model's length."),
]
Limit = Annotated[int | None, Option(help="Questions to ask.", show_default="all")]
Seed = Annotated[int, Option(help="Decides which questions, where there are more than --limit.")]
Batch = Annotated[int | None, Option(help="Questions answered at once.", show_default="1 on cpu, 16 on cuda")]
Stages = Annotated[
    Stage, Option(help="answer: only write answers down; score: only score those in the folder, without the model.")
]
Out = Annotated[Path | None, Option(help="Write rows, tables and the figure here.", show_default="results/ and name")]


def squality(*arguments: Any) -> None:
    """Questions on stories, answered in a paragraph (SQuALITY): ROUGE by policy and size.

    Each prompt is read exactly by a bounded state, and answered greedily from it. Row truncated is the unbounded model
    on a prompt of the size's tokens, row full the unbounded model on all of it. The score is the geometric mean of
    ROUGE-1, -2 and -L, each with the best of the references; intervals are 95 %, by bootstrap over the documents. What
    the folder has of the same model, prompt, policy and size is not answered again, so a run that was stopped goes on.

    Examples:
        msrnn eval squality --limit 2 --size 256
        msrnn eval squality --data test.jsonl --paper --limit 100
        msrnn eval squality --data test.jsonl --length 32768 --policy tova
        msrnn eval squality --paper --stage answer
    """


def qasper(*arguments: Any) -> None:
    """Questions on papers, answered in a phrase (QASPER): token F1 by policy and size.

    Each prompt is read exactly by a bounded state, and answered greedily from it. Row truncated is the unbounded model
    on a prompt of the size's tokens, row full the unbounded model on all of it. The score is the F1 of words with the
    nearest annotator's answer; yes/no and unanswerable questions are shown apart. Intervals are 95 %, by bootstrap over
    the documents. What the folder has of the same model, prompt, policy and size is not answered again.

    Examples:
        msrnn eval qasper --limit 2 --size 256
        msrnn eval qasper --data qasper-test-v0.3.json --paper
        msrnn eval qasper --data papers.jsonl --no-chat --model my-base-model
        msrnn eval qasper --paper --stage score
    """


def verb(about: Callable[..., None]) -> Callable[..., None]:
    """The command of a task: both have the same options, and differ in what they say of themselves."""

    def command(
        data: Data = None,
        split: Split = "test",
        policy: Policies = None,
        size: Sizes = None,
        paper: Paper = False,
        length: Length = 4096,
        chat: Chat = None,
        max_new_tokens: Answer = None,
        positions: Positions = AUTO,
        limit: Limit = None,
        seed: Seed = 0,
        batch: Batch = None,
        against: Against = None,
        model: Model = None,
        device: Device = "auto",
        dtype: Dtype = None,
        stage: Stages = Stage.ALL,
        out: Out = None,
        force: Anew = False,
    ) -> None:
        from msrnn.evaluate.store import Store
        from msrnn.evaluate.understanding.tasks import TASKS

        task = TASKS[about.__name__]
        table = asked(policy, size, paper)
        other = compared(against, table.policies)
        check_counts(length, limit=limit, batch=batch, max_new_tokens=max_new_tokens)
        if stage != Stage.ANSWER:
            task.metric.check()
        if stage == Stage.SCORE and force:
            raise ValueError("--force: it empties the folder, and --stage score reads what is there; give one of them")
        folder = out or Path("results") / task.name
        check_model(model, device, dtype, positions, stage)
        quiet()
        found = None if stage == Stage.SCORE else sourced(task, data, split, limit, seed)
        store = Store(rows_file(folder, task.name, force, figure=stage != Stage.ANSWER))
        if found is None:
            records, keys = stored(task, store, table.cells)
        else:
            from msrnn.models import load

            loaded = load(model, device, dtype, on_convert=note)
            chat = bool(loaded.tokenizer.chat_template) if chat is None else chat
            exam = examined(task, loaded.model, chat, length, max_new_tokens or task.answer, positions, table.cells)
            told = {"model": model or SMALL, "source": data.name if data else task.hub.name, "seed": seed}
            if data is None:
                told["split"] = split
            records = answered(task, loaded, exam, found, store, batch, table.cells, told)
            keys = [question.key for question in found]
        if stage != Stage.ANSWER:
            finish(task, table, records, keys, other, folder)

    command.__name__, command.__doc__ = about.__name__, about.__doc__
    return command


def asked(policies: list[str] | None, sizes: list[int] | None, paper: bool) -> Grid:
    """Whether nothing is forgotten at a size is found out question by question, so no size stands for full."""
    from msrnn.evaluate.cells import TRUNCATED, table

    if paper and (policies or sizes):
        raise ValueError("--paper: it has rows and sizes of its own; give this, or --policy and --size")
    rows, columns = policies or ROWS, PAPER_SIZES if paper else sizes or SIZES
    for name in rows:
        for size in columns:
            if name != TRUNCATED:
                resolve(name, size)
    return table(rows, columns, sys.maxsize)


def check_model(name: str | None, device: str, dtype: str | None, positions: str, stage: Stage) -> None:
    """What can be refused before anything is read."""
    from msrnn.models import check_dtype, device_named
    from msrnn.positions import spacing

    if stage != Stage.SCORE:
        device_named(device)
        check_dtype(dtype)
    if positions != AUTO:
        spacing(positions)


def sourced(task: Task, data: Path | None, split: str, limit: int | None, seed: int) -> list[Any]:
    from msrnn.evaluate.understanding.sources import questions

    found = questions(data, split, task.hub, task.forms, limit, seed)
    note(found.told())
    return found.questions


def examined(
    task: Task, model: PreTrainedModel, chat: bool, length: int, answer: int, positions: str, cells: Sequence[Cell]
) -> Exam:
    """What is computed, and whether it can be: refused before anything is."""
    from msrnn.evaluate.cells import UNBOUNDED
    from msrnn.evaluate.understanding.records import Exam
    from msrnn.evaluate.understanding.run import fingerprints
    from msrnn.positions import COMPRESSED, spacing
    from msrnn.rnn import MultiStateRNN

    config = model.config.get_text_config(decoder=True)
    check_positions(config, length + answer)
    known = getattr(config, "max_position_embeddings", None)
    if positions == AUTO:
        positions = COMPRESSED if known and length + answer > known else ORIGINAL
        if positions == COMPRESSED:
            note("so bounded states have compressed positions; --positions original leaves them as they are")
    apart = spacing(positions)
    for cell in cells:
        if cell.policy not in UNBOUNDED:
            MultiStateRNN(model, cell.policy, cell.size, positions=positions)
            break
    placed = apart.name if apart else ORIGINAL
    return Exam(task.name, **fingerprints(model), chat=chat, length=length, positions=placed, answer=answer)


def answered(
    task: Task,
    loaded: Any,
    exam: Exam,
    found: list[Any],
    store: Store,
    batch: int | None,
    cells: list[Cell],
    told: dict[str, Any],
) -> Records:
    from msrnn.evaluate.setting import setting
    from msrnn.evaluate.understanding.asking import Asker
    from msrnn.evaluate.understanding.records import Records
    from msrnn.evaluate.understanding.run import Run

    batch = batch or (16 if loaded.model.device.type == "cuda" else 1)
    asker = Asker(loaded.tokenizer, task.prompt, exam.chat)
    beside = {**told, "batch": batch, **setting(loaded.model.device)}
    records: Records = watched(Run(loaded.model, asker, found, Records(store, exam), batch, beside), cells)
    return records


def stored(task: Task, store: Store, cells: list[Cell]) -> tuple[Records, list[str]]:
    """Of the exam that was last sat: questions that all cells have answered."""
    from msrnn.evaluate.understanding.records import Exam, Records

    records = Records(store, Exam.last(store, task.name))
    keys = records.complete(cells)
    if not keys:
        missing = ", ".join(cell.label for cell in cells if not records.complete([cell]))
        raise ValueError(f"{store.path}: no question that all have answered ({missing} none); answer, or ask for less")
    note(f"{len(keys):,} of {len(records.asked):,} questions have been answered by all")
    return records, keys


def finish(task: Task, grid: Grid, records: Records, keys: list[str], against: str, folder: Path) -> None:
    from msrnn.evaluate.understanding.report import Report, headers, shown

    report = Report(task, grid, records, keys, against)
    told = {**records.exam.key, **records.told(grid.cells[0], keys[0])}
    title = f"{told['model']}, {task.title}, {len(keys):,} questions, prompts of {records.exam.length:,} tokens"
    show_table(f"{task.metric.name}: {title}", headers(report), report.table(shown))
    if report.compared:
        title_ = f"points against {against} at the same size, on the same questions"
        show_table(title_, headers(report), report.differences(lambda x: shown(x, sign="+")))
    note(report.told())
    write(report, folder, title, {name: str(value) for name, value in told.items()})


def write(report: Report, folder: Path, title: str, told: dict[str, str]) -> None:
    from msrnn.evaluate.understanding.figure import figure
    from msrnn.evaluate.understanding.report import as_csv, markdown

    name = report.task.name
    (folder / f"{name}.md").write_text(markdown(report, title, told))
    (folder / f"{name}.csv").write_text(as_csv(report))
    figure(report, folder, title)
    note(f"written to {folder}: " + ", ".join(f"{name}.{kind}" for kind in KINDS))
