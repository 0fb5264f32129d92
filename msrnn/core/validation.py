"""Checks of a state before it is saved, and after it was loaded.

Kernels check nothing. They rely on a free slot, distinct positions and finite numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from msrnn.checks import check_count, is_whole
from msrnn.core.own_sizes import group_by_fewer, lower_bound
from msrnn.core.protection import check_fits
from msrnn.core.recall_slots import RecallSlots
from msrnn.core.slots import MOST_COLUMNS, Growing, Memory, Slots
from msrnn.errors import UsageError
from msrnn.scored import refuse_scored

_SLACK = 1.01  # relative rounding error that float32 sums may have


def check_counts(description: dict[str, Any], layers: int) -> tuple[int, int]:
    """Batch size and columns of a file's description, before anything of that size is allocated."""
    batch_size: Any = description.get("batch_size")
    columns: Any = description.get("columns")
    check_count("batch_size", batch_size, of="sequences")
    if not isinstance(columns, list) or len(columns) != layers or not all(map(is_whole, columns)):
        raise UsageError(f"columns {columns!r:.40}: must be a list of {layers} whole numbers, one for each layer")
    if len(set(columns)) != 1 or not 0 <= columns[0] < 2**62:
        raise UsageError(f"columns {columns!r:.40}: must be the same number in every layer, 0 or more")
    return batch_size, columns[0]


def check_layers(layers: Sequence[tuple[int, Memory]], columns: int, incomplete: bool) -> None:
    """Refuse layers that no forward pass over `columns` columns can produce.

    `incomplete`: a layer may hold fewer tokens than fit, for example after a horizon was removed.
    """
    seen = layers[0][1].seen
    for index, layer in layers:
        if not torch.equal(layer.seen, seen):
            raise UsageError(
                f"layer {index}: has read {layer.seen.tolist()} tokens, but the first layer {seen.tolist()}"
            )
        try:
            _check_layer(layer, columns, incomplete)
        except ValueError as error:
            raise UsageError(f"layer {index}, {error}") from error


def check_savable(layers: Sequence[tuple[int, Memory]]) -> None:
    """Refuse layers that no file can hold."""
    for _, layer in layers:
        if isinstance(layer, Slots):
            refuse_scored(layer.bound.policy, "a file cannot hold its Python function; keep a copy with state.fork(1)")


def is_incomplete(layers: Sequence[tuple[int, Memory]]) -> bool:
    """Whether a layer without a window holds fewer tokens than it has read and has room for."""
    return any(bool(_short(layer).any()) for _, layer in layers if isinstance(layer, Slots) and not layer.bound.window)


def _short(slots: Slots) -> Tensor:
    """[B, G]"""
    held = (slots.position >= 0).sum(-1)
    return held < torch.minimum(slots.seen, slots.bound.size - slots.fewer[:, 0])[:, None]


def _check_layer(layer: Memory, columns: int, incomplete: bool) -> None:
    seen, position = layer.seen, layer.position
    _refuse(
        (seen < 0) | (seen > min(columns, MOST_COLUMNS)),
        seen,
        f"tokens of {columns} columns: must be between 0 and the number of columns",
    )
    beyond = (position < -1) | (position >= seen[:, None, None])
    _refuse(beyond.flatten(1), position.flatten(1), "is not the position of a token that was read")
    if isinstance(layer, Slots):
        _check_slots(layer, incomplete)
    else:
        _check_growing(layer, columns)
    _check_numbers(layer)


def _check_slots(slots: Slots, incomplete: bool) -> None:
    held, seen = (slots.position >= 0).sum(-1), slots.seen[:, None]
    size = slots.bound.size - slots.fewer[:, :1]
    named = " or ".join(map(str, size.unique().tolist()))
    _refuse(held > size, held, f"tokens are held, and the size is {named}: no slot is free")
    ordered = slots.position.sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    _refuse(twice.flatten(1), ordered[..., 1:].flatten(1), "is a position that is held twice")
    _check_ranges(slots)
    if isinstance(slots, RecallSlots):
        _check_guests(slots)
    if slots.bound.window or incomplete:  # here a token may be dropped although its slot is not needed
        _refuse((held == 0) & (seen > 0), held, "tokens are held, although some were read")
    else:
        _refuse(
            _short(slots),
            held,
            f"tokens are held, too few for size {named} and the tokens that were read",
        )


def _check_ranges(slots: Slots) -> None:
    """Refuse protected ranges of tokens that were not read, that overlap, or that leave the policy no row."""
    begin, end = slots.protected.unbind(-1)
    wrong = (begin < 0) | (end < begin) | (end > slots.seen[:, None])
    _refuse(wrong, end, "is the end of no range of tokens that were read, so they cannot be protected")
    begin = begin.masked_fill(begin == end, MOST_COLUMNS)  # empty ranges come last
    ordered = begin.argsort(-1)
    begin, end = begin.gather(-1, ordered), end.gather(-1, ordered)
    _refuse(begin[:, 1:] < end[:, :-1].cummax(-1).values, begin[:, 1:], "begins a protected range inside another")
    ranges = slots.protected.cpu()
    for fewer, sequences in group_by_fewer([slots.fewer]).items():
        check_fits(ranges[sequences], [lower_bound(slots.bound, slots.bound.size - fewer)], torch.zeros(len(sequences)))


def _check_guests(slots: RecallSlots) -> None:
    """Refuse guests that are not tokens that were read, and archived rows that are not finite."""
    beyond = (slots.guest_position < -1) | (slots.guest_position >= slots.seen[:, None, None])
    _refuse(beyond.flatten(1), slots.guest_position.flatten(1), "is the position of a guest that was not read")
    for name, rows in (("keys", slots.guest_keys), ("values", slots.guest_values)):
        _refuse_unless_finite(_finite(rows), f"guest {name}")
    slots.settle()
    for sequence, archive in enumerate(slots.archives):
        try:
            archive.check_finite()
        except UsageError as error:
            raise UsageError(f"sequence {sequence}: {error}") from error


def _refuse_unless_finite(finite: Tensor, what: str) -> None:
    """Name the first sequence of [B, ...] with a number that is not finite."""
    if not bool(finite.all()):
        raise UsageError(f"sequence {int((~finite).nonzero()[0, 0])}: {what} that are not finite")


def _check_growing(layer: Growing, columns: int) -> None:
    """Every token that was read has its column, in order; the other columns are padding or empty."""
    position = layer.position[:, 0]
    if columns > position.shape[1]:
        raise UsageError(f"sequence 0: {columns} columns were read, and there are {position.shape[1]}")
    real = position >= 0
    ordered = torch.where(real, real.cumsum(-1, dtype=torch.int32) - 1, -1)
    _refuse(position != ordered, position, "is a position out of order")
    _refuse(real[:, columns:], position[:, columns:], "is the position of a column that was not read")
    _refuse(real.sum(-1) != layer.seen, real.sum(-1), "tokens are held, not all that were read")


def _check_numbers(layer: Memory) -> None:
    held = mask_held_rows(layer)
    for name in ("keys", "values"):
        _refuse_unless_finite(~held | _finite(getattr(layer, name)), name)
    if isinstance(layer, Growing):
        return
    for name, scale in (("keys", layer.key_scale), ("values", layer.value_scale)):
        if scale is not None:
            wrong = held & ~(scale.isfinite() & (scale > 0))
            _refuse(wrong.flatten(1), scale.flatten(1), f"scales the {name}: must be finite and above 0")
    present = layer.position >= 0
    if layer.importance is not None:
        most = layer.seen[:, None, None] * _SLACK + 1  # a token's attention is at most 1 at each step
        wrong = present & ~((layer.importance >= 0) & (layer.importance <= most))
        _refuse(
            wrong.flatten(1),
            layer.importance.flatten(1),
            "is not an importance that attention can sum to: must be from 0 to the number of tokens read",
        )
    expected = layer.weigh_held()
    if layer.row_weight is not None and expected is not None:
        wrong = present & ~_close(layer.row_weight, expected)
        what = "the weight of the stored row" if layer.bound.policy.weights else "the norm of the stored values"
        _refuse(wrong.flatten(1), layer.row_weight.flatten(1), f"is not {what}")


def _close(one: Tensor, other: Tensor) -> Tensor:
    return one.isfinite() & (one >= 0) & torch.isclose(one, other, rtol=0.01, atol=1e-6)


def mask_held_rows(layer: Memory) -> Tensor:
    """[B, K, S]: which rows of keys and values belong to a token."""
    (_, K, _, _), G = layer.keys.shape, layer.position.shape[1]
    return (layer.position >= 0).repeat_interleave(K // G, 1)


def clear_free(layer: Memory) -> None:
    """Replace numbers in free slots that are not finite by zeros: attention of 0 times NaN would be NaN.

    Finite numbers stay: kernels take an upper bound of the scores over all rows, and another bound would round
    differently.
    """
    free = ~mask_held_rows(layer)
    for rows in (layer.keys, layer.values):
        bits = rows.view(torch.int8) if rows.itemsize == 1 else rows  # not every 8-bit float can be filled
        bits.masked_fill_((free & ~_finite(rows))[..., None], 0)
    if isinstance(layer, Slots):
        empty = layer.position < 0
        for kept in (layer.importance, layer.row_weight):
            if kept is not None:
                kept.masked_fill_(empty & ~kept.isfinite(), 0.0)
        for scale in (layer.key_scale, layer.value_scale):
            if scale is not None:
                scale.masked_fill_(free & ~scale.isfinite(), 1.0)


def _finite(rows: Tensor) -> Tensor:
    """[B, K, S, D] -> [B, K, S]"""
    if rows.dtype == torch.int8:
        return torch.ones(rows.shape[:3], dtype=torch.bool, device=rows.device)
    return (rows.float() if rows.itemsize == 1 else rows).isfinite().all(-1)


def _refuse(wrong: Tensor, values: Tensor, why: str) -> None:
    """Name the first sequence of [B] or [B, N] that is wrong, and its value."""
    if bool(wrong.any()):
        sequence, *column = wrong.nonzero()[0].tolist()
        raise UsageError(f"sequence {sequence}: {values[(sequence, *column)].item():g} {why}")
