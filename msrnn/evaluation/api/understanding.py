"""Questions on long documents: answers of each policy at each size, and their scores."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from msrnn.core.rope import ORIGINAL
from msrnn.errors import UsageError
from msrnn.evaluation.api.common import Folder, Note, check_positions, decoder_config, model_name, open_store
from msrnn.evaluation.api.result import EvaluationResult
from msrnn.evaluation.cells import TRUNCATED, Cell, Grid, check_lists, check_row, grid, reference_policy
from msrnn.evaluation.data.questions import Question
from msrnn.evaluation.environment import environment
from msrnn.evaluation.runner import Progress, Workers
from msrnn.evaluation.tasks.answer_scores import scores
from msrnn.evaluation.tasks.answers import Answers, Settings, check_record
from msrnn.evaluation.tasks.question_tasks import TASKS, QuestionTask
from msrnn.evaluation.tasks.understanding import AUTO, answer_questions, settings_of
from msrnn.evaluation.tasks.understanding_report import Report, figure
from msrnn.hf.loading import Loaded
from msrnn.policy import FULL, Policy


def understanding(
    model: PreTrainedModel,
    questions: Sequence[Question],
    policies: Sequence[str | Policy] = ("tova", "window+4", TRUNCATED, FULL.name),
    sizes: Sequence[int] = (512,),
    *,
    tokenizer: Any,
    task: str = "qasper",
    length: int = 4096,
    max_new_tokens: int | None = None,
    chat: bool | None = None,
    positions: str = AUTO,
    batch: int | None = None,
    against: str | Policy | None = None,
    folder: Folder = None,
    about: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    workers: Workers | None = None,
) -> EvaluationResult[Report]:
    """Answer questions on documents greedily, and score the answers.

    questions       see `msrnn.evaluation.data.questions.Question`
    policies        rows of the table: policies or their names, "full", or "truncated" (the full model on `size`
                    tokens); "echo + 256 recalled" recalls 256 archived KV rows
    sizes           columns of the table: KV rows per layer
    task            "qasper": a phrase, scored by the F1 of words; "squality": a paragraph, scored by ROUGE
    length          tokens of a prompt, at most; the document's end is cut
    max_new_tokens  of an answer; None: those of the task
    chat            use the chat template; None: if there is one
    positions       of kept tokens: original, compressed, compact; "auto": compressed beyond the training length
    batch           questions answered at once; None: what suits the device
    against         the policy that the others are compared with; None: "tova", or else the first
    folder          keep the records in FOLDER/TASK.jsonl, so that another call reuses them; None: nowhere
    about           facts that are written into every record, such as the name of the `model`
    """
    told = progress or Progress()
    if task not in TASKS:
        raise UsageError(f"must be one of {', '.join(TASKS)}", name="task", value=task)
    kind, table = TASKS[task], understanding_grid(policies, sizes)
    reference = reference_policy(against, table.policies)
    kind.metric.check()
    store = open_store(folder, kind.name, check_record)
    chat = bool(tokenizer.chat_template) if chat is None else chat
    most = max_new_tokens or kind.answer
    settings = resolve_settings(kind, model, chat, length, most, positions, table.cells, told.note)
    metadata = {"model": model_name(model), **(about or {}), **environment(model.device)}
    known = Answers(store, settings)
    loaded = Loaded(model, tokenizer)
    answers = answer_questions(loaded, kind, questions, known, table.cells, metadata, batch, told, workers)
    return score_answers(kind, table, answers, [question.key for question in questions], reference)


def understanding_grid(policies: Sequence[str | Policy], sizes: Sequence[int]) -> Grid:
    """The rows and columns. Whether a size holds a whole prompt depends on the question, so no size means full."""
    check_lists(policies, sizes)
    for name in policies:
        for size in sizes:
            if name != TRUNCATED:
                check_row(name, size)
    return grid(policies, sizes, sys.maxsize)


def resolve_settings(
    task: QuestionTask,
    model: PreTrainedModel,
    chat: bool,
    length: int,
    most: int,
    positions: str,
    cells: Sequence[Cell],
    note: Note,
) -> Settings:
    """The settings of a run, with a note where positions are compressed automatically."""
    config = decoder_config(model)
    rotated = getattr(config, "rope_parameters", None)
    check_positions(config, length if rotated else length + most, note)  # the answer needs learned positions, too
    settings = settings_of(task, model, chat, length, most, positions, cells)
    if positions == AUTO and settings.positions != ORIGINAL:
        note("bounded states use compressed positions; choose original to keep those of the text")
    return settings


def score_answers(
    task: QuestionTask,
    table: Grid,
    answers: Answers,
    keys: list[str],
    against: str,
    on_total: Callable[[int], object] = lambda _: None,
    on_score: Callable[[], object] = lambda: None,
) -> EvaluationResult[Report]:
    """Score the answers to these questions; also those of other cells that have answered all of them."""
    others = answers.others(table.cells, keys)
    table = table.extend(others)
    found = scores(task.metric, answers, table.cells, keys, on_total=on_total, on_score=on_score)
    report = Report(task, table, answers, keys, against, found)
    facts = {**answers.settings.key, **answers.metadata(table.cells[0], keys[0])}
    title = f"{facts['model']}, {task.title}, {len(keys):,} questions, prompts of {answers.settings.length:,} tokens"
    records = [answers.answer(cell, answers.questions[key]) for cell in table.cells for key in keys]
    return EvaluationResult(
        report,
        report.tables(title),
        [record for record in records if record is not None],
        facts,
        report.markdown(title, facts),
        lambda to: figure(report, to, title),
        [cell.label for cell in others],
    )
