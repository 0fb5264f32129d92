"""A budget: which layers need many KV rows and which few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from msrnn.errors import UsageError
from msrnn.evaluation.api.common import Folder, Texts, cut_chunks, model_name, open_store, result_of
from msrnn.evaluation.api.result import EvaluationResult
from msrnn.evaluation.data.texts import Choice
from msrnn.evaluation.environment import environment
from msrnn.evaluation.runner import Progress, Runner, Workers
from msrnn.evaluation.tasks.layer_losses import CHECK, NAME, Case, Report, figure, layer_loss_task
from msrnn.hf.rnn import MultiStateRNN
from msrnn.policy import FULL
from msrnn.size import parse_policy, resolve


def layer_budget(
    model: PreTrainedModel,
    texts: Texts,
    policy: str = "echo",
    sizes: Sequence[int] = (32, 64, 128, 256, 512, 1024, 2048),
    means: Sequence[int] = (128, 256, 512),
    *,
    tokenizer: Any = None,
    length: int = 4096,
    books: int | None = None,
    chunks_per_book: int = 1,
    seed: int = 0,
    batch: int | None = None,
    folder: Folder = None,
    about: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    workers: Workers | None = None,
) -> EvaluationResult[Report]:
    """Measure what bounding one layer alone costs, for each layer and size, and divide mean sizes by it.

    `report.write(path, facts)` writes the budget file that a size may name.

    texts            strings or token ids, in a list or by name
    policy           the policy whose layers are measured
    sizes            KV rows that each layer is measured at, all smaller than `length`
    means            mean sizes that the table divides among the layers
    tokenizer        needed where texts are strings
    length           tokens of a chunk
    books            texts to take chunks from; None: all
    chunks_per_book  chunks of each text, at most
    batch            chunks read at once; None: what suits the device
    folder           keep the records in FOLDER/budget.jsonl, so that another call reuses them; None: nowhere
    about            facts that are written into every record, such as the name of the `model` and of the `text`
    """
    told = progress or Progress()
    sizes, means = sorted(set(sizes)), sorted(set(means))
    check_budget(policy, sizes, means, length)
    store = open_store(folder, NAME, CHECK)
    data = cut_chunks(model, texts, tokenizer, Choice(length, books, chunks_per_book, seed), told.note)
    name, layers = parse_policy(policy)[0].name, MultiStateRNN(model, FULL, None).spec.divided
    source = {"model": model_name(model), "text": f"{len(texts):,} texts", **(about or {}), "seed": seed}
    run = Runner(layer_loss_task(model, data, {**source, **environment(model.device)}), store, model, batch, workers)
    cells = [Case(FULL.name), *(Case(name, layer, size) for layer in layers for size in sizes)]
    report = Report(name, layers, sizes, run.results(cells, told), data.predicted, means)
    title = f"{source['model']}, {name}, {source['text']}, {len(data.chunks):,} chunks of {length:,} tokens"
    facts = {"chunks": data.summary(), **run.facts}
    page = report.markdown(title, facts)
    return result_of(report, report.tables(title), facts, page, lambda to: figure(report, to, title), run, cells, [])


def check_budget(policy: str, sizes: Sequence[int], means: Sequence[int], length: int) -> None:
    """Refuse what cannot be measured."""
    value, given = parse_policy(policy)
    if not value.evicts:
        raise UsageError("evicts nothing", name="policy", value=policy, advice="measure a policy that does")
    if given is not None:
        raise UsageError("has a budget already", name="policy", value=policy, advice="measure the policy without it")
    for size in sizes:
        resolve(value, size)
    if len(sizes) < 2 or sizes[-1] >= length:
        raise UsageError(
            f"must be two sizes or more, smaller than the {length} tokens of a chunk", name="size", value=list(sizes)
        )
    for mean in means:
        if not sizes[0] <= mean <= sizes[-1]:
            raise UsageError(
                f"must be from {sizes[0]} to {sizes[-1]}, the sizes that are measured", name="mean", value=mean
            )
