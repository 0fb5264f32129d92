"""Perplexity of policies and sizes on chunks of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from msrnn.checks import check_count
from msrnn.evaluation.api.common import Folder, Texts, cut_chunks, model_name, open_store, result_of
from msrnn.evaluation.api.result import EvaluationResult
from msrnn.evaluation.cells import reference_policy
from msrnn.evaluation.data.texts import Choice
from msrnn.evaluation.environment import environment
from msrnn.evaluation.runner import Progress, Runner, Workers
from msrnn.evaluation.tasks.perplexity import CHECK, NAME, Report, figure, grid, perplexity_task
from msrnn.policy import FULL, Policy


def perplexity(
    model: PreTrainedModel,
    texts: Texts,
    policies: Sequence[str | Policy] = ("tova", FULL.name),
    sizes: Sequence[int] = (512,),
    *,
    tokenizer: Any = None,
    length: int = 4096,
    books: int | None = None,
    chunks_per_book: int = 4,
    seed: int = 0,
    batch: int | None = None,
    against: str | Policy | None = None,
    folder: Folder = None,
    about: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    workers: Workers | None = None,
) -> EvaluationResult[Report]:
    """Measure the perplexity of each policy at each size, and of the full model.

    Each chunk is read from an empty state, with exact eviction at every token. Every token after the given first one is
    predicted. `report.perplexity(policy, size)` is an estimate with its 95 % confidence interval.

    texts            strings or token ids, in a list or by name
    policies         rows of the table: policies or their names, "full", "baseline" (the full model on pieces of
                     `size`), or "future" (each layer evicts what its next 256 queries would miss least: a bound on what
                     a policy could know); "echo + 256 recalled" recalls 256 archived KV rows at every token
    sizes            columns of the table: KV rows per layer
    tokenizer        needed where texts are strings; its first token is put in front of every chunk
    length           tokens of a chunk
    books            texts to take chunks from; None: all
    chunks_per_book  chunks of each text, at most; `seed` and the names of the texts decide which
    batch            chunks read at once; None: what suits the device
    against          the policy that the others are compared with; None: "tova", or else the first
    folder           keep the records in FOLDER/perplexity.jsonl, so that another call reuses them; None: nowhere
    about            facts that are written into every record, such as the name of the `model` and of the `text`
    """
    told = progress or Progress()
    table = grid(policies, sizes, length)
    reference = reference_policy(against, table.policies)
    for name, value in (("books", books), ("chunks_per_book", chunks_per_book), ("batch", batch)):
        if value is not None:
            check_count(name, value)
    store = open_store(folder, NAME, CHECK)
    data = cut_chunks(model, texts, tokenizer, Choice(length, books, chunks_per_book, seed), told.note)
    source = {"model": model_name(model), "text": f"{len(texts):,} texts", **(about or {}), "seed": seed}
    run = Runner(perplexity_task(model, data, {**source, **environment(model.device)}), store, model, batch, workers)
    results = run.results(table.cells, told)
    others = run.other_results(table.cells)
    report = Report(table.extend(list(others)), {**results, **others}, data.predicted, reference)
    title = f"{source['model']}, {source['text']}, {len(data.chunks):,} chunks of {length:,} tokens"
    first = tokenizer.decode(data.opening) if data.opening else "none"
    facts = {"chunks": data.summary(), "first token": first, **run.facts}
    return result_of(
        report,
        report.tables(title),
        facts,
        report.markdown(title, facts),
        lambda to: figure(report, to, title),
        run,
        list(results),
        list(others),
    )
