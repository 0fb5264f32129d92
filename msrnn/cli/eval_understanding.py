from __future__ import annotations

import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from msrnn.cli.evaluation import (
    Against,
    Chat,
    EvaluationOptions,
    check_counts,
    check_positions,
    compared,
    note_other_rows,
    quiet,
    show_tables,
    stoppable,
    watched,
    write_report,
)
from msrnn.cli.terminal import note, progress
from msrnn.errors import UsageError
from msrnn.hf.model_options import ORIGINAL
from msrnn.policy import FULL
from msrnn.size import resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from msrnn.evaluation.cells import Cell, Grid
    from msrnn.evaluation.data.questions import Question
    from msrnn.evaluation.store import Store
    from msrnn.evaluation.tasks.answer_scores import Scores
    from msrnn.evaluation.tasks.answers import Answers, Settings
    from msrnn.evaluation.tasks.understanding import Task
    from msrnn.hf.loading import Loaded

ROWS, SIZES, PAPER_SIZES = ("tova", "window+4", "truncated", FULL.name), (512,), (256, 512, 1024, 2048, 4096)
LENGTH, AUTO = 4096, "auto"


class Stage(StrEnum):
    ALL = "all"
    ANSWER = "answer"
    SCORE = "score"


Data = Annotated[
    Path | None, Option(help="A .jsonl or .json file in a published format.", show_default="the dataset on the hub")
]
Split = Annotated[str, Option(help="Split of the dataset on the hub.")]
Policies = Annotated[
    list[str] | None,
    Option(
        "--policy",
        help="A row of the table: a policy, truncated or full; repeat for more.",
        show_default=", ".join(ROWS),
    ),
]
Paper = Annotated[bool, Option("--paper", help="The paper's rows and sizes, 256 to 4,096; --policy adds rows.")]
Sizes = Annotated[
    list[int] | None,
    Option(
        "--size", help="A column of the table: states, or tokens of row truncated; repeat for more.", show_default="512"
    ),
]
Length = Annotated[
    int | None,
    Option(help="Most tokens of a prompt; the document's end is cut.", show_default=str(LENGTH)),
]
Answer = Annotated[
    int | None, Option("--max-new-tokens", "--max-tokens", help="Most tokens of an answer.", show_default=False)
]
Positions = Annotated[
    str,
    Option(
        help="Positions of kept tokens: original, compressed, compact; auto: compressed beyond the training length."
    ),
]
Limit = Annotated[int | None, Option(help="Most questions to ask, document by document.", show_default="all")]
Seed = Annotated[int, Option(help="Random seed that selects questions if there are more than --limit.")]
Batch = Annotated[
    int | None, Option(help="Questions answered at once.", show_default="8 on cpu, 16 on cuda, or what fits")
]
Stages = Annotated[
    Stage,
    Option(
        help="answer: only generate answers; score: only score the answers in the folder, without the model: those of "
        "the last run, or of the last run with the given --length, --chat, --positions and --max-new-tokens."
    ),
]
Out = Annotated[
    Path | None, Option(help="Write rows, tables and the figure here.", show_default="results/ and the verb's name")
]


def squality(*arguments: Any) -> None:
    """Questions on stories, answered in a paragraph (SQuALITY): ROUGE by policy and size.

    A bounded state reads each prompt with exact eviction, and the answer is generated greedily. Row truncated is the
    full model on a prompt of `size` tokens, row full the full model on the whole prompt. The score is the geometric
    mean of ROUGE-1, -2 and -L, each with the best of the references; intervals are 95 %, by bootstrap over the
    documents. Answers that the folder has of the same model, prompt, policy and size are not generated again, so an
    interrupted run resumes.

    Examples:
        msrnn eval squality --limit 2 --size 256
        msrnn eval squality --data test.jsonl --paper --policy echo
        msrnn eval squality --data test.jsonl --length 32768 --policy tova
        msrnn eval squality --paper --stage answer
    """


def qasper(*arguments: Any) -> None:
    """Questions on papers, answered in a phrase (QASPER): token F1 by policy and size.

    A bounded state reads each prompt with exact eviction, and the answer is generated greedily. Row truncated is the
    full model on a prompt of `size` tokens, row full the full model on the whole prompt. The score is the F1 of words
    with the best of the references; yes/no and unanswerable questions are also shown separately. Intervals are 95 %, by
    bootstrap over the documents. Answers that the folder has of the same model, prompt, policy and size are not
    generated again.

    Examples:
        msrnn eval qasper --limit 2 --size 256
        msrnn eval qasper --data qasper-test-v0.3.json --paper
        msrnn eval qasper --data papers.jsonl --no-chat --model my-base-model
        msrnn eval qasper --paper --stage score
    """


def verb(about: Callable[..., None]) -> Callable[..., None]:
    """The command of a task; both tasks have the same options."""

    def command(
        *,
        data: Data = None,
        split: Split = "test",
        policy: Policies = None,
        size: Sizes = None,
        paper: Paper = False,
        length: Length = None,
        chat: Chat = None,
        max_new_tokens: Answer = None,
        positions: Positions = AUTO,
        limit: Limit = None,
        seed: Seed = 0,
        batch: Batch = None,
        against: Against = None,
        stage: Stages = Stage.ALL,
        out: Out = None,
        options: EvaluationOptions,
    ) -> None:
        from msrnn.evaluation.data.questions import QASPER_HUB, SQUALITY_HUB, check_source

        if stage != Stage.SCORE:
            check_source(data, {squality: SQUALITY_HUB, qasper: QASPER_HUB}[about])
        from msrnn.evaluation.tasks.answers import check_row
        from msrnn.evaluation.tasks.understanding import TASKS, stored_answers

        task = TASKS[about.__name__]
        grid = rows(policy, size, paper)
        other = compared(against, grid.policies)
        check_counts(LENGTH if length is None else length, limit=limit, batch=batch, max_new_tokens=max_new_tokens)
        if stage != Stage.ANSWER:
            task.metric.check()
        if stage == Stage.SCORE and options.force:
            raise UsageError("--force: generates answers again, but --stage score generates none; leave one out")
        folder = out or Path("results") / task.name
        check_model(options, positions, stage)
        quiet()
        questions = None if stage == Stage.SCORE else load_questions(task, data, split, limit, seed)
        store = options.open_store(folder, task.name, check_row)
        if questions is None:
            wanted = {"length": length, "chat": chat, "answer": max_new_tokens, "positions": positions}
            answers, keys = stored_answers(task, store, grid.cells, **wanted)
            note(f"{len(keys):,} of {len(answers.questions):,} questions are answered by all rows")
        else:
            loaded = options.load()
            chat = bool(loaded.tokenizer.chat_template) if chat is None else chat
            length, most = length or LENGTH, max_new_tokens or task.answer
            settings = resolved(task, loaded.model, chat, length, most, positions, grid.cells)
            source = {"model": options.model_name, "source": data.name if data else task.hub.name, "seed": seed}
            if data is None:
                source["split"] = split
            with stoppable(options.force):
                answers = answered(task, loaded, settings, questions, store, batch, grid.cells, source, options)
            keys = [question.key for question in questions]
        if stage != Stage.ANSWER:
            report_scores(task, grid, answers, keys, other, folder)

    command.__name__, command.__doc__ = about.__name__, about.__doc__
    return command


def rows(policies: list[str] | None, sizes: list[int] | None, paper: bool) -> Grid:
    """The rows and columns. Whether a size holds a whole prompt depends on the question, so no size means full."""
    from msrnn.evaluation.cells import TRUNCATED, grid

    if paper and sizes:
        raise UsageError("--paper: sets the sizes; leave out --paper or --size")
    names = [*(ROWS if paper or not policies else ()), *(policies or ())]
    columns = PAPER_SIZES if paper else sizes or SIZES
    for name in names:
        for size in columns:
            if name != TRUNCATED:
                resolve(name, size)
    return grid(names, columns, sys.maxsize)


def check_model(options: EvaluationOptions, positions: str, stage: Stage) -> None:
    """Refuse bad options before anything is loaded."""
    from msrnn.core.rope import spacing

    if stage != Stage.SCORE:
        options.check()
    if positions != AUTO:
        spacing(positions)


def load_questions(task: Task, data: Path | None, split: str, limit: int | None, seed: int) -> list[Question]:
    from msrnn.evaluation.data.questions import questions

    loaded = questions(data, split, task.hub, task.formats, limit, seed)
    note(loaded.summary())
    return loaded.questions


def resolved(
    task: Task, model: PreTrainedModel, chat: bool, length: int, most: int, positions: str, cells: list[Cell]
) -> Settings:
    """The settings of a run, with a note where positions are compressed automatically."""
    from msrnn.evaluation.tasks.understanding import settings_of

    config = model.config.get_text_config(decoder=True)
    rotated = getattr(config, "rope_parameters", None)
    check_positions(config, length if rotated else length + most)  # the answer needs learned positions, too
    settings = settings_of(task, model, chat, length, most, positions, cells)
    if positions == AUTO and settings.positions != ORIGINAL:
        note("bounded states use compressed positions; --positions original keeps the original ones")
    return settings


def answered(
    task: Task,
    loaded: Loaded,
    settings: Settings,
    questions: list[Question],
    store: Store,
    batch: int | None,
    cells: list[Cell],
    source: dict[str, Any],
    options: EvaluationOptions,
) -> Answers:
    from msrnn.evaluation.data.prompts import PromptBuilder
    from msrnn.evaluation.environment import environment
    from msrnn.evaluation.tasks.answers import Answers
    from msrnn.evaluation.tasks.understanding import Understanding

    builder = PromptBuilder(loaded.tokenizer, task.prompt, settings.chat)
    metadata = {**source, **environment(loaded.model.device)}
    evaluation = Understanding(loaded.model, builder, questions, Answers(store, settings), batch, metadata)
    with options.computing(evaluation):
        return watched(evaluation.answered, cells)


def report_scores(task: Task, grid: Grid, answers: Answers, keys: list[str], against: str, folder: Path) -> None:
    from msrnn.evaluation.tasks.understanding import Report, figure

    others = answers.others(grid.cells, keys)
    note_other_rows([cell.label for cell in others], 0)
    grid = grid.extended(others)
    report = Report(task, grid, answers, keys, against, scored(task, grid, answers, keys))
    facts = {**answers.settings.key, **answers.metadata(grid.cells[0], keys[0])}
    title = f"{facts['model']}, {task.title}, {len(keys):,} questions, prompts of {answers.settings.length:,} tokens"
    tables = report.tables(title)
    show_tables(tables)
    note(report.summary())
    write_report(folder, tables[0], report.markdown(title, facts), lambda: figure(report, folder, title))


def scored(task: Task, grid: Grid, answers: Answers, keys: list[str]) -> Scores:
    """Score with a progress bar, since ROUGE is slow."""
    from msrnn.evaluation.tasks.answer_scores import scores

    with progress("answers") as bar:
        line = bar.add_task("scoring", total=None)
        return scores(
            task.metric,
            answers,
            grid.cells,
            keys,
            on_total=lambda count: bar.update(line, total=count),
            on_score=lambda: bar.advance(line),
        )
