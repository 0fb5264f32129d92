"""Attention of one layer that recalls: rows are archived, and tokens attend to guests besides the held rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from msrnn.backends.base import Backend
from msrnn.core.guests import Attention, attend_guests, move_rows, recall
from msrnn.core.paged_slots import PagedSlots
from msrnn.core.recall_slots import RecallSlots
from msrnn.core.scores import Scoring
from msrnn.layer import Record, attend
from msrnn.recall import Recalling


def attend_recalling(
    slots: RecallSlots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
    scoring: Scoring,
    chunk: int,
    backend: Backend,
    record: Record | None,
    real: Tensor | None,
    recalling: Recalling | None,
) -> Tensor:
    """`attend` for a layer with an archive: all rows go there, and tokens attend to the guests that they recall.

    Without `recalling`, tokens see no guests. Several tokens that recall are of one sequence, without padding.
    """
    rest: Any = scoring, chunk, backend, record
    if recalling is None:
        slots.clear_guests((position >= 0).any(-1))
        output = attend(slots, query, key, value, position, *rest)
        _archive(slots, key, value, position, scoring, real)
        return output
    blocks = zip(
        *(x.split(recalling.every, 2) for x in (query, key, value)), position.split(recalling.every, 1), strict=True
    )
    outputs = []
    for q, k, v, at in blocks:
        _recall(slots, q, k, at, scoring, recalling)
        outputs.append(_attend_with_guests(slots, q, k, v, at, *rest))
        _archive(slots, k, v, at, scoring, real if query.shape[2] == 1 else None)
    return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]


def _recall(
    slots: RecallSlots, query: Tensor, key: Tensor, position: Tensor, scoring: Scoring, recalling: Recalling
) -> None:
    """Let a block of each sequence recall, if it is due."""
    if scoring.repositioning is not None:
        first = torch.where(position >= 0, position, position.amax(1, keepdim=True)).amin(1, keepdim=True)
        query, key = (
            move_rows(rows, position, position - first + slots.reach, scoring.repositioning) for rows in (query, key)
        )
    always = recalling.starts or recalling.every == 1
    if isinstance(slots, PagedSlots) and always:
        from msrnn.backends.triton.recall import recall_triton

        recall_triton(slots, query, key, position, scoring)
        return
    for b, first in enumerate(position[:, 0].tolist()):
        if first >= 0 and (always or first % recalling.every == 0):
            slots.archives[b].end = first  # kernels may have archived tokens that the host does not know of
            recall(slots.view(slice(b, b + 1)), query[b : b + 1], key[b : b + 1], first, scoring)


def _archive(
    slots: RecallSlots, key: Tensor, value: Tensor, position: Tensor, scoring: Scoring, real: Tensor | None
) -> None:
    key = move_rows(key, position, 0, scoring.repositioning)
    if isinstance(slots, PagedSlots):
        from msrnn.backends.triton.archive import archive_triton

        archive_triton(slots, key, value, position)
    else:
        slots.archive(key, value, real)


def _attend_with_guests(
    slots: RecallSlots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
    scoring: Scoring,
    chunk: int,
    backend: Backend,
    record: Record | None,
) -> Tensor:
    """Attend to held rows and guests. To a backend, guests are a sink of each query: they are not observed."""
    guests = _attend_guests(slots, query, position, scoring)
    sinks, share = guests.log_sum, torch.empty_like(guests.log_sum)
    if scoring.sinks is not None:
        sinks = torch.logaddexp(sinks, scoring.sinks.float()[:, None])
    output = attend(slots, query, key, value, position, replace(scoring, sinks=sinks), chunk, backend, record, share)
    if scoring.sinks is not None:
        share = share * (guests.log_sum - sinks).nan_to_num(nan=-torch.inf).exp()  # without the learned sinks
    return _add_guests(slots, output, share, guests.output)


def _attend_guests(slots: RecallSlots, query: Tensor, position: Tensor, scoring: Scoring) -> Attention:
    query = move_rows(query, position, slots.reach, scoring.repositioning)
    if isinstance(slots, PagedSlots):
        from msrnn.backends.triton.recall import attend_guests_triton

        return attend_guests_triton(slots, query, position, scoring)
    return attend_guests(slots, query, position, scoring)


def _add_guests(slots: RecallSlots, output: Tensor, share: Tensor, guests: Tensor) -> Tensor:
    if isinstance(slots, PagedSlots):
        from msrnn.backends.triton.recall import add_guests_triton

        return add_guests_triton(output, share, guests)
    return output + (share[..., None] * guests).transpose(1, 2).to(output.dtype)
