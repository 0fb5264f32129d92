"""The chunks of each kind of text: those to train on, and those that are held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.errors import UsageError
from msrnn.evaluation.api.common import Texts, check_positions, decoder_config, documents_of
from msrnn.evaluation.data.texts import Choice, Chunk, Document, choose, rank
from msrnn.training.plan import TrainingPlan


class Kind(NamedTuple):
    """One kind of text."""

    name: str
    train: Tensor  # [N, T] token ids
    held_out: Tensor  # [M, T], of other texts than the first, as far as there are enough


def cut_kinds(model: PreTrainedModel, texts: Mapping[str, Texts], tokenizer: Any, plan: TrainingPlan) -> list[Kind]:
    """Cut texts of several kinds into chunks; each kind has the same share of them."""
    if not texts:
        raise UsageError("empty", name="texts", advice="give a text to train on")
    check_positions(decoder_config(model), plan.length, lambda _: None)
    if plan.chunks < len(texts):
        message = f"must be one for each of the {len(texts)} kinds of text, or more"
        raise UsageError(message, name="chunks", value=plan.chunks)
    kinds = []
    for i, (name, of_kind) in enumerate(texts.items()):
        documents = documents_of(of_kind)
        if tokenizer is None and any(document.ids is None for document in documents):
            raise UsageError("texts are strings", name="tokenizer", advice="give a tokenizer, or token ids")
        count = plan.chunks // len(texts) + (i < plan.chunks % len(texts))
        kinds.append(_cut_kind(name, documents, tokenizer, plan, count))
    return kinds


def _cut_kind(name: str, documents: Sequence[Document], tokenizer: Any, plan: TrainingPlan, count: int) -> Kind:
    needed, each = count + plan.held_out, -(-(count + plan.held_out) // len(documents))
    chunks: list[Chunk] = []
    while len(chunks) < needed:
        choice = Choice(plan.length, min(needed, len(documents)), each, plan.seed)
        try:
            data = choose(documents, tokenizer, choice)
        except UsageError as error:
            raise _too_short(name, plan, needed, 0) from error
        chunks = data.chunks
        if len(chunks) < needed and len(chunks) == data.available:
            raise _too_short(name, plan, needed, len(chunks))
        each *= 2
    chunks = sorted(chunks, key=lambda chunk: (rank(plan.seed, chunk.book), chunk.start))
    # Chunks of as many texts as possible, and each text's in turn: the last texts are the held-out ones.
    ids = torch.tensor([chunk.ids for chunk in chunks])
    return Kind(name, ids[:count], ids[len(ids) - plan.held_out :])


def _too_short(name: str, plan: TrainingPlan, needed: int, found: int) -> UsageError:
    return UsageError(
        f"{name}: {found:,} chunks of {plan.length:,} tokens, and {needed:,} are needed, which are "
        f"{needed * plan.length:,} tokens; give more text, or use fewer or shorter chunks"
    )
