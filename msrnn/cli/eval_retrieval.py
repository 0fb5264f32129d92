from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

from msrnn.cli.evaluation import evaluate_model, load_model
from msrnn.cli.evaluation_checks import check_counts, check_length
from msrnn.cli.evaluation_options import Chat, EvaluationOptions
from msrnn.cli.files import manual
from msrnn.cli.options import as_typed
from msrnn.cli.recall_options import RecallOptions
from msrnn.cli.results_folder import report
from msrnn.errors import UsageError
from msrnn.evaluation.data.texts import check_source
from msrnn.policy import FULL

AUTO = "auto"
POLICIES, SIZES, LENGTHS, DEPTHS = ("tova", "echo", FULL.name), (128,), (512,), (0.0, 0.25, 0.5, 0.75, 1.0)
NAMES = "number, word, uuid, keys, values, json, variables"


class Place(StrEnum):
    BOTH = "both"
    FIRST = "first"
    LAST = "last"


Text = Annotated[
    Path | None,
    Option(
        help="The haystack: a .txt file, a folder of them, or .jsonl lines with a text.", show_default="Python's manual"
    ),
]
Tasks = Annotated[
    list[str] | None, Option("--task", help=f"What is hidden: {NAMES}; repeat for more.", show_default="all")
]
Policies = Annotated[
    list[str] | None,
    Option("--policy", help="A version of the model: a policy, or full; repeat.", show_default=", ".join(POLICIES)),
]
Sizes = Annotated[list[int] | None, Option("--size", help="KV rows per layer; repeat for more.", show_default="128")]
Lengths = Annotated[
    list[int] | None, Option("--length", help="Most tokens of a prompt; repeat for more.", show_default="512")
]
Depths = Annotated[
    list[float] | None,
    Option(
        "--depth",
        help="Where the fact is, from 0 (beginning) to 1 (end); repeat for more.",
        show_default="0, 0.25, … 1",
    ),
]
Question = Annotated[
    Place, Option(help="Ask before the text (the model knows what to look for), after it, or in both ways.")
]
Limit = Annotated[int, Option(help="Questions of each task and length, in turn at each depth.")]
Positions = Annotated[
    str,
    Option(
        help="Positions of kept tokens: original, compressed, compact; auto: compressed beyond the training length."
    ),
]
Seed = Annotated[int, Option(help="Random seed of what is hidden, and where.")]
Batch = Annotated[
    int | None, Option(help="Questions answered at once.", show_default="8 on cpu, 16 on cuda, or what fits")
]
Out = Annotated[Path, Option(help="Write retrieval.jsonl, .md, .csv, .png and .svg here.")]


def retrieval(
    *,
    text: Text = None,
    task: Tasks = None,
    policy: Policies = None,
    size: Sizes = None,
    length: Lengths = None,
    depth: Depths = None,
    question: Question = Place.BOTH,
    limit: Limit = 5,
    chat: Chat = None,
    positions: Positions = AUTO,
    seed: Seed = 0,
    batch: Batch = None,
    out: Out = Path("results/retrieval"),
    recalling: RecallOptions,
    options: EvaluationOptions,
) -> None:
    """Facts hidden in a long text, and questions about them, by policy, size, length and depth; synthetic, as RULER's.

    The tasks are one fact (number, word, uuid), one of several facts (keys), several facts (values), a pair of a JSON
    object (json), and a chain of assignments (variables). Asked after the text, a policy cannot know what to keep;
    asked before, it can. Answers are greedy; an answer counts by the share of the expected values that occur in it.
    Answers that the folder has of the same model, prompt, policy and size are not generated again, so an interrupted
    run resumes. The figure has a heatmap of depth and length for each version.

    With --recall, the bounded policies archive every token, and the end of a prompt and its answer recall the KV rows
    that they ask for. These are versions of their own, as "echo 128 + 64 recalled", next to those without recall.

    Examples:
        msrnn eval retrieval --limit 5
        msrnn eval retrieval --task number --length 4096 --length 8192 --size 512 --size 2048
        msrnn eval retrieval --text books/ --policy tova --policy full --question last
        msrnn eval retrieval --policy echo --recall 64 --question last
    """
    if text is not None:
        check_source(text)
    check_length(min(length or LENGTHS))
    check_counts(limit=limit, batch=batch)
    for value in depth or ():
        if not 0 <= value <= 1:
            raise UsageError(f"--depth {as_typed(value)}: must be from 0 to 1")
    from msrnn import evaluation
    from msrnn.evaluation.api.retrieval import check_questions, retrieval_grid
    from msrnn.evaluation.data.needles import TASKS
    from msrnn.evaluation.data.texts import documents
    from msrnn.evaluation.tasks.retrieval import CHECK, NAME

    policies, sizes, tasks = recalling.add_to(policy or POLICIES), size or SIZES, task or list(TASKS)
    retrieval_grid(policies, sizes)
    check_questions(tasks, length or LENGTHS, depth or DEPTHS, question, limit, positions)
    options.check()
    words = "\n\n".join(one.read() for one in documents(text)) if text else manual()
    haystack = text.resolve().name if text else "Python's manual"
    loaded = load_model(options, out, NAME, CHECK, haystack=haystack)
    run = partial(
        evaluation.retrieval,
        text=words,
        policies=policies,
        sizes=sizes,
        tasks=tasks,
        lengths=length or LENGTHS,
        depths=depth or DEPTHS,
        question=question,
        limit=limit,
        chat=chat,
        positions=positions,
        seed=seed,
        batch=batch,
    )
    report(evaluate_model(options, loaded, run), out)
