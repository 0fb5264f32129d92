"""Facts hidden in a long text, and questions about them: which does a bounded state still answer?"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from msrnn.checks import check_count
from msrnn.core.rope import COMPRESSED, ORIGINAL, name_of, spacing
from msrnn.errors import UsageError
from msrnn.evaluation.api.common import Folder, check_positions, decoder_config, model_name, open_store, result_of
from msrnn.evaluation.api.result import EvaluationResult
from msrnn.evaluation.cells import Grid, check_lists, check_row, grid
from msrnn.evaluation.data.needles import PLACES, TASKS, Haystack, Sample
from msrnn.evaluation.environment import environment
from msrnn.evaluation.runner import Progress, Runner, Workers
from msrnn.evaluation.tasks.retrieval import CHECK, NAME, Case, Report, Retrieval, figure
from msrnn.policy import FULL, Policy

AUTO, BOTH = "auto", "both"
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def retrieval(
    model: PreTrainedModel,
    text: str,
    policies: Sequence[str | Policy] = ("tova", "echo", FULL.name),
    sizes: Sequence[int] = (128,),
    *,
    tokenizer: Any,
    tasks: Sequence[str] = tuple(TASKS),
    lengths: Sequence[int] = (512,),
    depths: Sequence[float] = DEPTHS,
    question: str = BOTH,
    limit: int = 5,
    chat: bool | None = None,
    positions: str = AUTO,
    seed: int = 0,
    batch: int | None = None,
    folder: Folder = None,
    about: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    workers: Workers | None = None,
) -> EvaluationResult[Report]:
    """Measure how many hidden facts each policy at each size can still tell.

    Answers are greedy. An answer counts by the share of the expected values that occur in it.

    text       the haystack that facts are hidden in
    policies   policies or their names, or "full"; "echo + 64 recalled" recalls 64 archived KV rows
    sizes      KV rows per layer
    tasks      number, word, uuid, keys, values, json, variables
    lengths    tokens of a prompt, at most
    depths     where the fact is, from 0 (the beginning of the text) to 1 (its end)
    question   "first": before the text; "last": after it; or "both"
    limit      questions of each task and length, in turn at each depth
    chat       use the chat template; None: if there is one
    positions  of kept tokens: original, compressed, compact; "auto": compressed beyond the training length
    seed       decides what is hidden, and where
    batch      questions answered at once; None: what suits the device
    folder     keep the records in FOLDER/retrieval.jsonl, so that another call reuses them; None: nowhere
    about      facts that are written into every record, such as the name of the `model` and of the `haystack`
    """
    told = progress or Progress()
    cells = retrieval_grid(policies, sizes).cells
    lengths, depths, tasks = sorted(set(lengths)), sorted(set(depths)), list(dict.fromkeys(tasks))
    check_questions(tasks, lengths, depths, question, limit, positions)
    store = open_store(folder, NAME, CHECK)
    config = decoder_config(model)
    check_positions(config, max(lengths), told.note)
    if positions == AUTO:
        known = getattr(config, "max_position_embeddings", None)
        positions = COMPRESSED if known and max(lengths) > known else ORIGINAL
    chat = bool(tokenizer.chat_template) if chat is None else chat
    haystack = Haystack(tokenizer, text, chat, seed)
    places = PLACES if question == BOTH else (question,)
    samples = [
        Sample(name, tokens, depth, number)
        for name in tasks
        for tokens in lengths
        for depth, number in spread_over_depths(depths, limit)
    ]
    told.note(f"making {len(samples) * len(places):,} prompts")
    asked = [haystack.ask(sample, place) for place in places for sample in samples]
    source = {"model": model_name(model), "haystack": "a text", **(about or {}), "seed": seed, "chat": chat}
    task = Retrieval(model, tokenizer, asked, name_of(spacing(positions)), {**source, **environment(model.device)})
    run = Runner(task, store, model, batch, workers)
    results = run.results([Case(*cell, place) for place in places for cell in cells], told)
    others = run.other_results(list(results))
    report = Report({**results, **others}, task.asked)
    title = f"{source['model']}, {len(samples):,} questions in {source['haystack']}"
    return result_of(
        report,
        report.tables(title),
        run.facts,
        report.markdown(title, run.facts),
        lambda to: figure(report, to, title),
        run,
        list(results),
        list(others),
    )


def retrieval_grid(policies: Sequence[str | Policy], sizes: Sequence[int]) -> Grid:
    """The policies and sizes. Prompts have several lengths, so no size means the full model."""
    check_lists(policies, sizes)
    for name in policies:
        for size in sizes:
            check_row(name, size)
    return grid(policies, sizes, sys.maxsize)


def check_questions(
    tasks: Sequence[str], lengths: Sequence[int], depths: Sequence[float], question: str, limit: int, positions: str
) -> None:
    """Refuse bad values before anything is computed. Errors name one value: `depth` for one of the depths."""
    for name in tasks:
        if name not in TASKS:
            raise UsageError(f"must be one of {', '.join(TASKS)}", name="task", value=name)
    for length in lengths:
        check_count("length", length, least=2)
    for depth in depths:
        if not 0 <= depth <= 1:
            raise UsageError("must be from 0 to 1", name="depth", value=depth)
    check_count("limit", limit)
    if question not in (BOTH, *PLACES):
        raise UsageError(f"must be one of {', '.join((BOTH, *PLACES))}", name="question", value=question)
    if positions != AUTO:
        spacing(positions)


def spread_over_depths(depths: Sequence[float], limit: int) -> list[tuple[float, int]]:
    """This many places, each with its number at the same depth; fewer places than depths are spread over them."""
    if limit < len(depths):
        return [(depths[i * len(depths) // limit], 0) for i in range(limit)]
    return [(depths[i % len(depths)], i // len(depths)) for i in range(limit)]
