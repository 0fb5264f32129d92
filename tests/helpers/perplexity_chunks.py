"""Chunks of random tokens, and a run of perplexity over them."""

from __future__ import annotations

from transformers import PreTrainedModel

from msrnn.evaluation.cells import Cell
from msrnn.evaluation.data.texts import Chunk, Data
from msrnn.evaluation.runner import Runner
from msrnn.evaluation.store import Record, Store
from msrnn.evaluation.tasks.perplexity import perplexity_task
from tests.helpers.tiny import tokens

LENGTH = 40
FULL = Cell("full", None)


def runner(
    model: PreTrainedModel, made: Data, store: Store, batch: int | None, metadata: Record
) -> Runner[Cell, str, float]:
    return Runner(perplexity_task(model, made, metadata), store, model, batch)


def data(chunks: int = 3, opening: int = 1) -> Data:
    ids = tokens(8, LENGTH)[:chunks]
    ids[:, :opening] = 1
    made = [Chunk("book", LENGTH * i, row) for i, row in enumerate(ids.tolist())]
    return Data(made, [1] * opening, LENGTH, 1, 0, chunks, 0)
