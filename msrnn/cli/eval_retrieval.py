from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from msrnn.cli.evaluation import (
    Chat,
    EvaluationOptions,
    check_counts,
    check_positions,
    computed,
    show_tables,
    write_report,
)
from msrnn.cli.files import manual
from msrnn.cli.options import as_typed
from msrnn.cli.terminal import note
from msrnn.errors import UsageError
from msrnn.evaluation.data.texts import check_source
from msrnn.hf.model_options import ORIGINAL
from msrnn.policy import FULL
from msrnn.size import resolve

if TYPE_CHECKING:
    from msrnn.evaluation.cells import Grid

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
Sizes = Annotated[
    list[int] | None, Option("--size", help="States that each layer may hold; repeat for more.", show_default="128")
]
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
    options: EvaluationOptions,
) -> None:
    """Facts hidden in a long text, and questions about them, by policy, size, length and depth; synthetic, as RULER's.

    The tasks are one fact (number, word, uuid), one of several facts (keys), several facts (values), a pair of a JSON
    object (json), and a chain of assignments (variables). Asked after the text, a policy cannot know what to keep;
    asked before, it can. Answers are greedy; an answer counts by the share of the expected values that occur in it.
    Answers that the folder has of the same model, prompt, policy and size are not generated again, so an interrupted
    run resumes. The figure has a heatmap of depth and length for each version.

    Examples:
        msrnn eval retrieval --limit 5
        msrnn eval retrieval --task number --length 4096 --length 8192 --size 512 --size 2048
        msrnn eval retrieval --text books/ --policy tova --policy full --question last
    """
    if text is not None:
        check_source(text)
    lengths, depths = sorted(set(length or LENGTHS)), sorted(set(depth or DEPTHS))
    grid = rows(policy, size)
    check_counts(min(lengths), limit=limit, batch=batch)
    for value in depths:
        if not 0 <= value <= 1:
            raise UsageError(f"--depth {as_typed(value)}: must be from 0 to 1")
    from msrnn.core.rope import COMPRESSED, name_of, spacing
    from msrnn.evaluation.data.needles import PLACES, TASKS, Haystack, Sample
    from msrnn.evaluation.data.texts import documents
    from msrnn.evaluation.environment import environment
    from msrnn.evaluation.tasks.retrieval import CHECK, NAME, Case, Report, Retrieval, figure

    tasks = list(dict.fromkeys(task or TASKS))
    for name in tasks:
        if name not in TASKS:
            raise UsageError(f"--task {name}: must be one of {', '.join(TASKS)}")
    if positions != AUTO:
        spacing(positions)
    options.check()
    words = "\n\n".join(one.read() for one in documents(text)) if text else manual()
    store = options.open_store(out, NAME, CHECK)
    decoder, tokenizer = options.load()
    config = decoder.config.get_text_config(decoder=True)
    check_positions(config, max(lengths))
    if positions == AUTO:
        known = getattr(config, "max_position_embeddings", None)
        positions = COMPRESSED if known and max(lengths) > known else ORIGINAL
    chat = bool(tokenizer.chat_template) if chat is None else chat
    haystack = Haystack(tokenizer, words, chat, seed)
    places = PLACES if question == Place.BOTH else (question.value,)
    samples = [
        Sample(name, tokens, where, number)
        for name in tasks
        for tokens in lengths
        for where, number in in_turn(depths, limit)
    ]
    note(f"making {len(samples) * len(places):,} prompts")
    asked = [haystack.ask(sample, place) for place in places for sample in samples]
    source = {"model": options.model_name, "haystack": text.resolve().name if text else "Python's manual"}
    about = {**source, "seed": seed, "chat": chat, **environment(decoder.device)}
    evaluation = Retrieval(decoder, tokenizer, asked, name_of(spacing(positions)), store, batch, about)
    cases = [Case(*cell, place) for place in places for cell in grid.cells]
    results, others = computed(evaluation, cases, options)
    report = Report({**results, **others}, evaluation.asked)
    title = f"{source['model']}, {len(samples):,} questions in {source['haystack']}"
    tables = report.tables(title)
    show_tables(tables)
    facts = {**evaluation.key, **evaluation.metadata}
    write_report(out, tables[0], report.markdown(title, facts), lambda: figure(report, out, title))


def in_turn(depths: list[float], limit: int) -> list[tuple[float, int]]:
    """This many places, each with its number at the same depth; fewer places than depths are spread over them."""
    if limit < len(depths):
        return [(depths[i * len(depths) // limit], 0) for i in range(limit)]
    return [(depths[i % len(depths)], i // len(depths)) for i in range(limit)]


def rows(policies: list[str] | None, sizes: list[int] | None) -> Grid:
    from msrnn.evaluation.cells import grid

    names, columns = policies or POLICIES, sizes or SIZES
    for name in names:
        for states in columns:
            resolve(name, states)
    return grid(names, columns, sys.maxsize)
