from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from msrnn.cli.evaluation import evaluate
from msrnn.cli.evaluation_checks import check_against, check_counts, check_length
from msrnn.cli.evaluation_options import Against, Chat, EvaluationOptions
from msrnn.cli.recall_options import RecallOptions
from msrnn.cli.results_folder import report
from msrnn.cli.terminal import note, progress, quiet
from msrnn.errors import UsageError
from msrnn.policy import FULL

if TYPE_CHECKING:
    from msrnn.evaluation.api.result import EvaluationResult
    from msrnn.evaluation.cells import Grid
    from msrnn.evaluation.data.questions import Question
    from msrnn.evaluation.tasks.answers import Answers
    from msrnn.evaluation.tasks.question_tasks import QuestionTask

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
        "--size",
        help="A column of the table: KV rows per layer, or tokens of row truncated; repeat for more.",
        show_default="512",
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
    Path | None, Option(help="Write records, tables and the figure here.", show_default="results/ and the verb's name")
]


def squality(*arguments: Any) -> None:
    """Questions on stories, answered in a paragraph (SQuALITY): ROUGE by policy and size.

    A bounded state reads each prompt with exact eviction, and the answer is generated greedily. Row truncated is the
    full model on a prompt of `size` tokens, row full the full model on the whole prompt. The score is the geometric
    mean of ROUGE-1, -2 and -L, each with the best of the references; intervals are 95 %, by bootstrap over the
    documents. Answers that the folder has of the same model, prompt, policy and size are not generated again, so an
    interrupted run resumes. With --recall, the end of a prompt and its answer recall evicted tokens, in rows of their
    own: "echo + 256 recalled".

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
    generated again. With --recall, the end of a prompt and its answer recall evicted tokens, in rows of their own:
    "echo + 256 recalled".

    Examples:
        msrnn eval qasper --limit 2 --size 256
        msrnn eval qasper --data qasper-test-v0.3.json --paper
        msrnn eval qasper --data papers.jsonl --no-chat --model my-base-model
        msrnn eval qasper --policy echo --recall 256
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
        recalling: RecallOptions,
        options: EvaluationOptions,
    ) -> None:
        from msrnn.evaluation.data.questions import QASPER_HUB, SQUALITY_HUB, check_source

        if stage != Stage.SCORE:
            check_source(data, {squality: SQUALITY_HUB, qasper: QASPER_HUB}[about])
        from msrnn.evaluation.api.understanding import resolve_settings
        from msrnn.evaluation.environment import environment
        from msrnn.evaluation.tasks.answers import Answers, check_record
        from msrnn.evaluation.tasks.question_tasks import TASKS
        from msrnn.evaluation.tasks.understanding import answer_questions, load_answers

        task = TASKS[about.__name__]
        grid = choose_cells(policy, size, paper, recalling)
        reference = check_against(recalling.add_to([against])[0] if against else None, grid.policies)
        check_length(LENGTH if length is None else length)
        check_counts(limit=limit, batch=batch, max_new_tokens=max_new_tokens)
        if stage != Stage.ANSWER:
            task.metric.check()
        if stage == Stage.SCORE and options.force:
            raise UsageError("--force: generates answers again, but --stage score generates none; leave one out")
        folder = out or Path("results") / task.name
        check_model(options, positions, stage)
        quiet()
        questions = None if stage == Stage.SCORE else load_questions(task, data, split, limit, seed)
        store = options.open_store(folder, task.name, check_record)
        if questions is None:
            wanted = {"length": length, "chat": chat, "answer": max_new_tokens, "positions": positions}
            answers, keys = load_answers(task, store, grid.cells, **wanted)
            note(f"{len(keys):,} of {len(answers.questions):,} questions are answered by all rows")
        else:
            loaded = options.load()
            chat = bool(loaded.tokenizer.chat_template) if chat is None else chat
            most = max_new_tokens or task.answer
            settings = resolve_settings(task, loaded.model, chat, length or LENGTH, most, positions, grid.cells, note)
            source = {"model": options.model_name, "source": data.name if data else task.hub.name, "seed": seed}
            if data is None:
                source["split"] = split
            metadata = {**source, **environment(loaded.model.device)}
            known = Answers(store, settings)
            answers = evaluate(
                options,
                lambda callbacks: answer_questions(
                    loaded, task, questions, known, grid.cells, metadata, batch, callbacks, options.workers
                ),
            )
            keys = [question.key for question in questions]
        if stage != Stage.ANSWER:
            result = score(task, grid, answers, keys, reference)
            report(result, folder)
            note(result.report.summary())

    command.__name__, command.__doc__ = about.__name__, about.__doc__
    return command


def choose_cells(policies: list[str] | None, sizes: list[int] | None, paper: bool, recalling: RecallOptions) -> Grid:
    """The rows and columns of the table."""
    from msrnn.evaluation.api.understanding import understanding_grid

    if paper and sizes:
        raise UsageError("--paper: sets the sizes; leave out --paper or --size")
    names = [*(ROWS if paper or not policies else ()), *(policies or ())]
    return understanding_grid(recalling.add_to(names), PAPER_SIZES if paper else sizes or SIZES)


def check_model(options: EvaluationOptions, positions: str, stage: Stage) -> None:
    """Refuse bad options before anything is loaded."""
    from msrnn.core.rope import spacing

    if stage != Stage.SCORE:
        options.check()
    if positions != AUTO:
        spacing(positions)


def load_questions(task: QuestionTask, data: Path | None, split: str, limit: int | None, seed: int) -> list[Question]:
    from msrnn.evaluation.data.questions import questions

    loaded = questions(data, split, task.hub, task.formats, limit, seed)
    note(loaded.summary())
    return loaded.questions


def score(task: QuestionTask, grid: Grid, answers: Answers, keys: list[str], against: str) -> EvaluationResult[Any]:
    """Score with a progress bar, since ROUGE is slow."""
    from msrnn.evaluation.api.understanding import score_answers

    with progress("answers") as bar:
        line = bar.add_task("scoring", total=None)
        return score_answers(
            task,
            grid,
            answers,
            keys,
            against,
            on_total=lambda count: bar.update(line, total=count),
            on_score=lambda: bar.advance(line),
        )
