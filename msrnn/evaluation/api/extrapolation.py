"""Perplexity far beyond the training length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from msrnn.checks import check_count
from msrnn.errors import UsageError
from msrnn.evaluation.api.common import (
    Folder,
    Texts,
    check_positions,
    decoder_config,
    documents_of,
    model_name,
    open_store,
    result_of,
)
from msrnn.evaluation.api.result import EvaluationResult
from msrnn.evaluation.data.texts import Choice, choose
from msrnn.evaluation.environment import environment
from msrnn.evaluation.runner import Progress, Runner, Workers
from msrnn.evaluation.tasks.extrapolation import CHECK, Extrapolation
from msrnn.evaluation.tasks.extrapolation_cases import Case, cases
from msrnn.evaluation.tasks.extrapolation_legs import Course
from msrnn.evaluation.tasks.extrapolation_report import NAME, Report, figure
from msrnn.evaluation.tasks.leg_states import states_folder
from msrnn.hf.extension import REACH

ROWS = ("tova@compressed", "window+4@compact", "tova@original", "echo+1~{horizon}@compressed")


def extrapolation(
    model: PreTrainedModel,
    texts: Texts,
    rows: Sequence[str] | None = None,
    size: int = 512,
    *,
    tokenizer: Any = None,
    tokens: int = 70_000,
    window: int = 1_000,
    leg: int = 10_000,
    books: int | None = None,
    seed: int = 0,
    batch: int | None = None,
    folder: Folder = None,
    about: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    workers: Workers | None = None,
) -> EvaluationResult[Report]:
    """Measure the perplexity of the first tokens of each text that is long enough, window by window.

    One state reads a text from its first token to its last, with exact eviction at every token.

    texts      strings or token ids, in a list or by name
    rows       of the table: POLICY@POSITIONS, such as "tova@compressed"; None: four of them
    size       KV rows per layer
    tokenizer  needed where texts are strings
    tokens     to read of each text
    window     tokens per point
    leg        tokens after which the state is saved, to resume from; a multiple of the window
    books      texts to read; None: all
    batch      texts read at once; None: one on a CPU, all on a GPU
    folder     keep records and states in this folder, so that another call resumes; None: nowhere
    about      facts that are written into every record, such as the name of the `model` and of the `text`
    """
    told = progress or Progress()
    chosen = extrapolation_cases(rows, size)
    check_course(tokens, window, leg)
    store = open_store(folder, NAME, CHECK)
    documents, config = documents_of(texts), decoder_config(model)
    check_positions(config, tokens, told.note, "tokens")
    for case in chosen:
        case.rnn(model)  # refuses a row that cannot be computed, before the work starts
    told.note(f"looking for {tokens:,} tokens in each of {len(documents):,} texts")
    choice = Choice(tokens, books, chunks_per_book=1, seed=seed, first=True, length_name="tokens")
    data = choose(documents, tokenizer, choice)
    told.note(data.summary())
    if window <= data.given:
        raise UsageError(
            f"the first {data.given} tokens are given and not predicted",
            name="window",
            value=window,
            advice="use a larger window",
        )
    source = {"model": model_name(model), "text": f"{len(texts):,} texts", **(about or {}), "seed": seed}
    course = Course(tokens, data.given, window, leg)
    task = Extrapolation(model, data, course, states_folder(store), {**source, **environment(model.device)})
    run = Runner(task, store, model, batch, workers)
    results = run.results(chosen, told)
    others = run.other_results(chosen)
    report = Report({**results, **others}, course)
    title = f"{source['model']}, {source['text']}, {tokens:,} tokens of {len(data.chunks):,} texts, {_sizes(report)}"
    facts = {"texts": data.summary(), **run.facts}
    trained = getattr(config, "max_position_embeddings", None)
    return result_of(
        report,
        report.tables(title),
        facts,
        report.markdown(title, facts),
        lambda to: figure(report, to, title, trained),
        run,
        list(results),
        list(others),
        lambda case: f"{case.label} {case.size}",
    )


def extrapolation_cases(rows: Sequence[str] | None, size: int) -> list[Case]:
    """The rows of the table; without any, four that cover what helps beyond the training length."""
    return cases(rows or [row.format(horizon=REACH * size) for row in ROWS], size)


def check_course(tokens: int, window: int, leg: int) -> None:
    check_count("tokens", tokens, least=2)
    check_count("window", window)
    check_count("leg", leg)
    if leg % window:
        raise UsageError(
            f"must be a multiple of the window, {window}, such as {-(-leg // window) * window}", name="leg", value=leg
        )


def _sizes(report: Report) -> str:
    sizes = sorted({case.size for case in report.cases if case.size is not None})
    return f"size {', '.join(map(str, sizes))}" if sizes else "unbounded"
