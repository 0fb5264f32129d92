"""The true future: a layer evicts the row that its own next queries would miss least.

No policy can know these queries, so this is a bound on what a policy could gain. It needs the whole text at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from msrnn.checks import check_count
from msrnn.core.change import AHEAD, output_changes
from msrnn.core.scores import Scoring

VERSION = 1  # of the definition below: part of the key of stored results
MATRICES = 10  # float32 numbers for each query and row that `attend` holds at once, at most


@dataclass(frozen=True)
class Future:
    """How a layer evicts: after each token, the row leaves that the next queries would miss least.

    A query misses a row by the squared change of its output without it (`msrnn.core.change`), added over all query
    heads of the layer. The queries attend as if this layer evicted nothing; lower layers have evicted. Ties: the
    oldest row leaves.

    size     KV rows of each layer
    ahead  the number of next queries that count; None: all
    recent   the newest rows that never leave, the new one included
    """

    size: int
    ahead: int | None = AHEAD
    recent: int = 0

    def __post_init__(self) -> None:
        check_count("size", self.size, of="KV rows")
        if self.ahead is not None:
            check_count("ahead", self.ahead, of="steps")
        check_count("recent", self.recent, least=0, most=self.size - 1, of="KV rows")

    @property
    def numbers(self) -> dict[str, int | None]:
        """Identifies the definition in stored results."""
        return {"version": VERSION, "ahead": self.ahead, "recent": self.recent}


def attend(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, future: Future) -> tuple[Tensor, Tensor]:
    """Read whole texts: query [B, H, T, D], key and value [B, K, T, D] -> output [B, T, H, Dv], evicted_at [B, T].

    A token is seen from its own step to the step that evicts it; T: it never leaves.
    """
    T = query.shape[2]
    if future.size >= T:
        evicted_at = torch.full((len(query), T), T, device=query.device)
    else:
        evicted_at = find_evictions(rank_rows(sum_heads(query, key, value, scoring), future.ahead), future)
    mask = find_visible(evicted_at)[:, None]
    outputs = [scaled_dot_product_attention(*head, mask, scale=scoring.scale) for head in _split(query, key, value)]
    return torch.cat(outputs, 1).transpose(1, 2), evicted_at


def sum_heads(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """The change of each query's output without each row, over all heads, if nothing was evicted: [B, T, T] float32.

    One head at a time, since a matrix of all queries and rows is large.
    """
    (B, _, T, _), device = query.shape, query.device
    later = torch.ones(T, T, dtype=torch.bool, device=device).triu(1)
    changes = torch.zeros(B, T, T, device=device)
    for q, k, v in _split(query, key, value.float()):
        attention = scoring(q, k).masked_fill_(later, -torch.inf).softmax(-1)
        changes += output_changes(attention, torch.matmul(attention, v), v)[:, 0]
    return changes


def rank_rows(changes: Tensor, ahead: int | None) -> Tensor:
    """Changes [B, T, T] by query and row -> ranks [B, T, T] by step and row: the sum over the next `ahead` queries.

    Windows are added up from windows of half their width. Differences of running sums would lose small ranks, which
    decide what leaves, in the rounding of the large changes before them.
    """
    T = changes.shape[1]
    window = _shift(changes, 1)
    if ahead is None or ahead >= T:
        return window.flip(1).cumsum(1).flip(1)
    ranks, added, width = torch.zeros_like(changes), 0, 1  # `window`: sums over `width` queries
    while True:
        if ahead & width:
            ranks += _shift(window, added)
            added += width
        if added == ahead:
            return ranks
        window = window + _shift(window, width)
        width *= 2


def _shift(matrix: Tensor, steps: int) -> Tensor:
    """The rows of `steps` later queries; zeros after the last."""
    shifted = torch.zeros_like(matrix)
    shifted[:, : matrix.shape[1] - steps] = matrix[:, steps:]
    return shifted


def find_evictions(ranks: Tensor, future: Future) -> Tensor:
    """Ranks [B, T, T] by step and row -> the step that evicts each row [B, T]; T: it never leaves.

    From step `size` on, each step evicts one row. The loop has three small kernels per step: on a GPU, their launches
    are its time, for any number of texts.
    """
    B, T, _ = ranks.shape
    evicted_at = torch.full((B, T), T, device=ranks.device)
    gone = torch.zeros(B, T, dtype=torch.bool, device=ranks.device)
    chosen = []
    for step in range(future.size, T):
        last = step + 1 - future.recent
        chosen.append(ranks[:, step, :last].masked_fill(gone[:, :last], torch.inf).argmin(-1, keepdim=True))
        gone.scatter_(1, chosen[-1], True)
    if chosen:
        steps = torch.arange(future.size, T, device=ranks.device)
        evicted_at.scatter_(1, torch.cat(chosen, 1), steps.expand(B, -1))
    return evicted_at


def find_visible(evicted_at: Tensor) -> Tensor:
    """Which rows each query sees, [B, T, T]: those up to itself that were not evicted before its step."""
    steps = torch.arange(evicted_at.shape[1], device=evicted_at.device)
    return (steps <= steps[:, None]) & (steps[:, None] <= evicted_at[:, None])


def _split(query: Tensor, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Each query head with its KV head: [B, 1, T, D] three times."""
    shared = query.shape[1] // key.shape[1]
    for h in range(query.shape[1]):
        own = slice(h // shared, h // shared + 1)
        yield query[:, h : h + 1], key[:, own], value[:, own]
