"""Guests: archived rows that a block of tokens recalls by its own queries, and attends to besides the held rows.

A block is one token or some consecutive ones of a sequence. An archived token is ranked by the largest attention that a
query of the block would pay to it if nothing had been evicted: a softmax over all archived tokens and the block itself,
mean over the query heads of a KV head. The first of those that are not held become the guests of the KV head, and
replace its guests before.

Where keys are re-rotated, archived keys have no rotation, and all stand at one place: `reach` positions before the
block that searches, and before each query that attends to guests.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from msrnn.core.archive import Archive
from msrnn.core.protection import hide_protected
from msrnn.core.recall_slots import RecallSlots
from msrnn.core.rope import Repositioning
from msrnn.core.scores import Scoring

SCORES = 2**26  # numbers that a search computes at once


class Attention(NamedTuple):
    """Attention to the guests alone."""

    log_sum: Tensor  # [B, H, T] float32, of the exponentials of the scores; -inf where a query sees no guest
    output: Tensor  # [B, H, T, Dv] float32


def recall(slots: RecallSlots, query: Tensor, key: Tensor, first: int, scoring: Scoring) -> None:
    """Let a block of one sequence recall its guests; the archive has the tokens before it.

    query [1, H, T, D], key [1, K, T, D]; `first` is the position of its first token.
    """
    (archive,), K = slots.archives, key.shape[1]
    if archive.end == archive.begin:
        slots.clear_guests()
        return
    chosen = find_guests(slots, query[0].unflatten(0, (K, -1)), key[0], first, scoring)
    keys, values = archive.gather(chosen)
    slots.set_guests(keys.to(query.device), values.to(query.device), chosen)


def find_guests(slots: RecallSlots, query: Tensor, key: Tensor, first: int, scoring: Scoring) -> Tensor:
    """The positions [K, n] of a block's guests, in order, -1 where there is none: all other tokens are held.

    query [K, R, T, D], key [K, T, D]
    """
    (archive,), (K, R, T, _) = slots.archives, query.shape
    count = archive.end - archive.begin
    heads = max(1, min(K, SCORES // (R * T * max(1, count))))
    parts = [
        _score_tokens(archive, query[k : k + heads], key[k : k + heads], slice(k, k + heads), scoring)
        for k in range(0, K, heads)
    ]
    at = find_held(slots, torch.tensor([first], device=query.device))[0]
    held = at.repeat_interleave(K // at.shape[0], 0).long() - archive.begin
    share = torch.nn.functional.pad(torch.cat(parts), (0, 1))  # a column for slots that hold no archived token
    share = share.scatter(1, held.masked_fill(held < 0, count), -1.0)[:, :count]
    best = share.topk(min(slots.bound.guests, count), 1)
    return (best.indices + archive.begin).masked_fill(best.values < 0, -1).sort(1).values


def find_held(slots: RecallSlots, first: Tensor) -> Tensor:
    """The positions [B, G, S] of rows that the tokens from position `first` [B] on see, -1 for others.

    A row that leaves its window or horizon when the first of them is appended can be a guest.
    """
    bound, position = slots.bound, slots.position
    if bound.window is None:
        return position
    leaves = position if bound.sliding else hide_protected(position, slots.ranges)
    expired = (leaves >= bound.spared) & (leaves <= first[:, None, None] - bound.window)
    return position.masked_fill(expired, -1)


def _score_tokens(archive: Archive, query: Tensor, key: Tensor, heads: slice, scoring: Scoring) -> Tensor:
    """The score of each archived token [K, N] for some KV heads: query [K, R, T, D], key [K, T, D]."""
    K, R, T, _ = query.shape
    rows = query.flatten(1, 2)[None]
    scores = []
    for _, keys in archive.keys_to_search():
        near = keys.pick_heads(heads).to(query.device).dequantized(query.dtype)
        scores.append(scoring(rows, near[None])[0])
    own = scoring(rows, key[None])[0].view(K, R, T, T)
    own = own.masked_fill(torch.ones(T, T, dtype=torch.bool, device=own.device).triu(1), -torch.inf)
    weights = torch.cat([*(part.view(K, R, T, -1) for part in scores), own], -1).softmax(-1)
    return weights[..., : weights.shape[-1] - T].mean(1).amax(1)


def move_rows(
    rows: Tensor, position: Tensor, new_position: Tensor | int, repositioning: Repositioning | None
) -> Tensor:
    """Queries or keys [B, H, T, D] of positions [B, T] at other ones, or all at one; unchanged if none is given."""
    if repositioning is None:
        return rows
    if isinstance(new_position, int):
        new_position = torch.full_like(position, new_position)
    return repositioning.rerotate(rows, position[:, None], new_position[:, None]).to(rows.dtype)


def attend_guests(slots: RecallSlots, query: Tensor, position: Tensor, scoring: Scoring) -> Attention:
    """Attention of queries [B, H, T, D] at positions [B, T] to the guests."""
    (B, H, T, D), (_, K, n, _) = query.shape, slots.guest_keys.shape
    scores = scoring(query.reshape(B, K, -1, D), slots.guest_keys).view(B, K, H // K, T, n)
    at, t = slots.guest_position[:, :, None, None], position[:, None, None, :, None]
    seen = (at >= 0) & (t >= 0)
    if slots.bound.sliding and slots.bound.window is not None:
        seen = seen & (at > t - slots.bound.window)
    scores = scores.masked_fill(~seen, -torch.inf)
    log_sum = scores.logsumexp(-1)
    weights = (scores - log_sum[..., None].nan_to_num(neginf=0.0)).exp()
    output = torch.einsum("bkrtn,bknd->bkrtd", weights, slots.guest_values.float())
    return Attention(log_sum.view(B, H, T), output.reshape(B, H, T, -1))
