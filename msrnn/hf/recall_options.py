"""Options of recall that depend on the model, its layers and their positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msrnn.bound import Bound
from msrnn.core.paged_slots import PagedSlots
from msrnn.core.recall_slots import RecallSlots, archive_layout
from msrnn.core.rope import Capped, Spacing
from msrnn.core.slots import LayerShape, Slots
from msrnn.errors import UsageError
from msrnn.hf.extension import REACH
from msrnn.recall import EXACT, QUESTION, SEGMENT, Recall


def check_recall(recall: Recall, bounds: Sequence[Bound | None], linear: Sequence[bool]) -> None:
    """Refuse recall where no layer evicts or some layers do not."""
    if any(bound is None and not skipped for bound, skipped in zip(bounds, linear, strict=True)):
        raise UsageError("needs a size for every layer", name="recall", value=recall.rows, advice="give one to each")
    if not any(bound and recalls(bound) for bound in bounds):
        raise UsageError(
            "no layer of this model forgets a token that it could see",
            name="recall",
            value=recall.rows,
            advice="use a policy and a size that evict, or leave it out",
        )


def recalls(bound: Bound) -> bool:
    """Whether a layer can evict a token that it could see: one that holds its whole sliding window cannot."""
    return bound.window is not None or not bound.sliding


def add_recall(bound: Bound, recall: Recall) -> Bound:
    return replace(bound, recall=recall) if recalls(bound) else bound


def is_paged(shape: LayerShape, bound: Bound, backend: str) -> bool:
    """Whether kernels read and write a layer's archive: not where rows are quantized."""
    recall = bound.recall
    if recall is None or backend != "triton" or recall.search == EXACT:
        return False
    quantized = recall.state_dtype or shape.state_dtype
    return not quantized and recall.folder is None and recall.limit is None


def slots_class(shape: LayerShape, bound: Bound) -> type[Slots]:
    """The kind of slots that a layer has."""
    return PagedSlots if shape.paged else RecallSlots if bound.recall else Slots


def check_archive(layer: object, shape: LayerShape, bound: Bound) -> None:
    """Refuse a layer whose archive is searched in another way than this shape and bound say, or has another limit."""
    assert bound.recall is not None
    advice, copies = "use rnn.convert_state(state)", archive_layout(shape, bound.recall).index_on is not None
    if type(layer) is not slots_class(shape, bound) or (
        isinstance(layer, RecallSlots) and layer.searches_copies != copies
    ):
        raise UsageError(
            "the archives of this state are searched in another way: by kernels or by the host, by archived "
            "keys or by 8-bit copies",
            advice=advice,
        )
    if isinstance(layer, RecallSlots) and layer.most_archived != shape.archived:
        theirs, mine = ("all" if most is None else f"{most:,}" for most in (layer.most_archived, shape.archived))
        raise UsageError(
            f"the archives of this state keep {theirs} tokens, and those of this RNN {mine}", advice=advice
        )


def find_reach(config: Any, bound: Bound, spaced: Spacing | None) -> int:
    """How far before a query archived rows stand, where keys are re-rotated: as far as held rows can be.

    So they stand before what the model has just read, and near enough for one that finds little far away. Among held
    rows, they would seem to be a part of it.
    """
    if spaced is None or bound.recall is None:
        return 0
    reach = bound.window - 1 if bound.window else REACH * bound.size
    if isinstance(spaced.function, Capped):
        reach = min(reach, spaced.function.limit * bound.size)
    length: int | None = getattr(config, "max_position_embeddings", None)
    if length is None:
        return reach
    most = length - max(QUESTION, bound.recall.every)
    if bound.size > most:
        raise UsageError(
            f"recalled rows {bound.size:,} positions away do not fit the {length:,} positions of this model",
            name="recall",
            value=bound.recall.rows,
            advice="use a smaller size",
        )
    return min(reach, most)


def count_archived(layers: Sequence[tuple[LayerShape, Bound]]) -> int | None:
    """The tokens that fit into the bytes of a sequence's archive, in all processes; None: there is no limit."""
    recall = layers[0][1].recall
    if recall is None or recall.limit is None:
        return None
    row = sum(
        archive_layout(shape, recall).row_bytes * (shape.shards.count if shape.shards else 1) for shape, _ in layers
    )
    tokens = recall.limit // row
    if tokens < 2 * SEGMENT:
        raise UsageError(
            f"{2 * SEGMENT:,} tokens are the least that an archive drops rows of, {2 * SEGMENT * row:,} bytes",
            name="archive_bytes",
            value=recall.limit,
            advice="allow more, or leave it out",
        )
    return tokens
