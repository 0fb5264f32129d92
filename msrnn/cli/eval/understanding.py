from __future__ import annotations

import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from msrnn.cli.eval.common import Against, Anew, check_counts, compared, quiet
from msrnn.cli.eval.exam import AUTO, answered, examined, finish, sourced, stored, wanted
from msrnn.cli.options import SMALL, Device, Dtype, Model
from msrnn.cli.results import SkipDamaged, open_store, stoppable
from msrnn.cli.terminal import note
from msrnn.errors import UsageError
from msrnn.policy import FULL, resolve

if TYPE_CHECKING:
    from msrnn.evaluation.cells import Grid

ROWS, SIZES, PAPER_SIZES = ("tova", "window+4", "truncated", FULL), (512,), (256, 512, 1024, 2048, 4096)
LENGTH = 4096


class Stage(StrEnum):
    ALL = "all"
    ANSWER = "answer"
    SCORE = "score"


Data = Annotated[Path | None, Option(help="A .jsonl or .json file in the original form.", show_default="the hub's")]
Split = Annotated[str, Option(help="Of the hub's dataset.")]
Policies = Annotated[
    list[str] | None,
    Option("--policy", help="A row: a policy, truncated or full; repeat for more.", show_default=", ".join(ROWS)),
]
Paper = Annotated[bool, Option("--paper", help="The paper's rows, and those named beside, at 256 to 4,096.")]
Sizes = Annotated[
    list[int] | None,
    Option("--size", help="A column: states, or tokens of truncated; repeat for more.", show_default="512"),
]
Length = Annotated[
    int | None,
    Option(help="Tokens that a prompt may have; the document's end is cut.", show_default=str(LENGTH)),
]
Chat = Annotated[
    bool | None,
    Option("--chat/--no-chat", help="Ask by the chat template, or with the bare text.", show_default="chat if any"),
]
Answer = Annotated[int | None, Option("--max-new-tokens", help="Tokens of an answer, at most.", show_default=False)]
Positions = Annotated[
    str,
    Option(help="Where kept tokens stand: original, compressed, compact; auto: compressed past the model's length."),
]
Limit = Annotated[int | None, Option(help="Questions to ask, document by document.", show_default="all")]
Seed = Annotated[int, Option(help="Decides which questions, where there are more than --limit.")]
Batch = Annotated[int | None, Option(help="Questions answered at once.", show_default="8 on cpu, 16 on cuda")]
Stages = Annotated[
    Stage,
    Option(
        help="answer: only write answers down; score: only score those in the folder, without the model: the last, or "
        "the last with the length, chat, positions and answers' tokens that are given."
    ),
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
        msrnn eval squality --data test.jsonl --paper --policy echo
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
        length: Length = None,
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
        skip_damaged: SkipDamaged = False,
    ) -> None:
        from msrnn.evaluation.understanding.records import check_row
        from msrnn.evaluation.understanding.tasks import TASKS

        task = TASKS[about.__name__]
        table = asked(policy, size, paper)
        other = compared(against, table.policies)
        check_counts(LENGTH if length is None else length, limit=limit, batch=batch, max_new_tokens=max_new_tokens)
        if stage != Stage.ANSWER:
            task.metric.check()
        if stage == Stage.SCORE and force:
            raise UsageError("--force: it answers again, and --stage score answers nothing; give one of them")
        folder = out or Path("results") / task.name
        check_model(device, dtype, positions, stage)
        quiet()
        found = None if stage == Stage.SCORE else sourced(task, data, split, limit, seed)
        store = open_store(folder, task.name, check_row, force=force, skip_damaged=skip_damaged)
        if found is None:
            meant = wanted(length, chat, max_new_tokens, positions)
            records, keys = stored(task, store, table.cells, meant)
        else:
            from msrnn.hf.loading import load

            loaded = load(model, device, dtype, on_convert=note)
            chat = bool(loaded.tokenizer.chat_template) if chat is None else chat
            length, most = length or LENGTH, max_new_tokens or task.answer
            exam = examined(task, loaded.model, chat, length, most, positions, table.cells)
            told = {"model": model or SMALL, "source": data.name if data else task.hub.name, "seed": seed}
            if data is None:
                told["split"] = split
            with stoppable(force):
                records = answered(task, loaded, exam, found, store, batch, table.cells, told)
            keys = [question.key for question in found]
        if stage != Stage.ANSWER:
            finish(task, table, records, keys, other, folder)

    command.__name__, command.__doc__ = about.__name__, about.__doc__
    return command


def asked(policies: list[str] | None, sizes: list[int] | None, paper: bool) -> Grid:
    """Whether nothing is forgotten at a size is found out question by question, so no size stands for full."""
    from msrnn.evaluation.cells import TRUNCATED, table

    if paper and sizes:
        raise UsageError("--paper: it has sizes of its own; give this, or --size")
    rows = [*(ROWS if paper or not policies else ()), *(policies or ())]
    columns = PAPER_SIZES if paper else sizes or SIZES
    for name in rows:
        for size in columns:
            if name != TRUNCATED:
                resolve(name, size)
    return table(rows, columns, sys.maxsize)


def check_model(device: str, dtype: str | None, positions: str, stage: Stage) -> None:
    """What can be refused before anything is read."""
    from msrnn.core.rope import spacing
    from msrnn.hf.loading import check_dtype, device_named

    if stage != Stage.SCORE:
        device_named(device)
        check_dtype(dtype)
    if positions != AUTO:
        spacing(positions)
