"""Attention of one layer that recalls: rows are archived, and tokens attend to guests besides the held rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from msrnn.backends.base import Backend
from msrnn.core.guests import attend_guests, recall
from msrnn.core.recall_slots import RecallSlots
from msrnn.core.scores import Scoring
from msrnn.layer import Record, attend


@dataclass(frozen=True)
class Recalling:
    """When the tokens of a forward pass recall: blocks of `every` tokens, which begin at multiples of it."""

    every: int
    starts: bool  # whether the first token begins a block, too, wherever it is

    def blocks(self, first: int, tokens: int) -> Iterator[tuple[slice, bool]]:
        """The blocks of tokens from position `first` on, and whether each recalls rows, or uses those of before."""
        begin = 0
        while begin < tokens:
            end = min(tokens, begin + self.every - (first + begin) % self.every)
            yield slice(begin, end), (first + begin) % self.every == 0 or (begin == 0 and self.starts)
            begin = end


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
        slots.clear_guests()
        output = attend(slots, query, key, value, position, *rest)
        slots.archive(key, value, real)
        return output
    if query.shape[2] == 1:
        for b, archive in enumerate(slots.archives):
            due = recalling.starts or archive.end % recalling.every == 0
            if due and (real is None or bool(real[b])):
                recall(slots.view(slice(b, b + 1)), query[b : b + 1], key[b : b + 1], archive.end, scoring)
        output = _attend_with_guests(slots, query, key, value, position, *rest)
        slots.archive(key, value, real)
        return output
    assert slots.batch_size == 1
    assert real is None
    outputs = []
    for columns, recalls in recalling.blocks(slots.archives[0].end, query.shape[2]):
        q, k, v = (x[:, :, columns] for x in (query, key, value))
        if recalls:
            recall(slots, q, k, slots.archives[0].end, scoring)
        outputs.append(_attend_with_guests(slots, q, k, v, position[:, columns], *rest))
        slots.archive(k, v, None)
    return torch.cat(outputs, dim=1)


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
    guests = attend_guests(slots, query, position, scoring)
    sinks, share = guests.log_sum, torch.empty_like(guests.log_sum)
    if scoring.sinks is not None:
        sinks = torch.logaddexp(sinks, scoring.sinks.float()[:, None])
    output = attend(slots, query, key, value, position, replace(scoring, sinks=sinks), chunk, backend, record, share)
    share = share * (guests.log_sum - sinks).nan_to_num(nan=-torch.inf).exp()  # without the learned sinks
    return output + (share[..., None] * guests.output).transpose(1, 2).to(output.dtype)
