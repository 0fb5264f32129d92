"""What evicting the rows of lowest rank loses: exactly, and by a soft threshold that has a gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SHARES = (1 / 8, 1 / 4, 1 / 2)  # of the candidates that are evicted
WIDTH = 0.3  # of the soft threshold, in units of a logarithm of a rank


def counts_of(candidates: int) -> list[int]:
    """How many rows are evicted, for each of the shares."""
    return [min(max(1, round(share * candidates)), candidates - 1) for share in SHARES]


def sum_lost(score: Tensor, change: Tensor, evicted: int) -> Tensor:
    """The change [...] that the rows [..., C] of the lowest scores have together."""
    return change.gather(-1, score.topk(evicted, -1, largest=False).indices).sum(-1)


def sum_softly_lost(score: Tensor, change: Tensor, evicted: int) -> Tensor:
    """The same, where the rows near the border are evicted in part; `evicted` rows in sum, more or less.

    The border moves with the scores, so that raising all of them changes nothing.
    """
    ordered = score.detach().sort(-1).values
    border = (ordered[..., evicted - 1] + ordered[..., evicted])[..., None] / 2
    part = torch.sigmoid((border - score.detach()) / WIDTH)
    slope = part * (1 - part) + 1e-6
    moved = (slope * (score - score.detach())).sum(-1, keepdim=True) / slope.sum(-1, keepdim=True)
    return (torch.sigmoid((border + moved - score) / WIDTH) * change).sum(-1)


def compute_loss(score: Tensor, change: Tensor, reference: Sequence[Tensor]) -> Tensor:
    """The softly lost change [N, L, G, C], in units of what the policy loses without networks, [L] for each share."""
    losses = [
        sum_softly_lost(score, change, evicted).mean((0, 2)) / usual
        for evicted, usual in zip(counts_of(score.shape[-1]), reference, strict=True)
    ]
    return torch.stack(losses).mean()
