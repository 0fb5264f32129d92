"""How much the outputs of a layer change when one of its rows is missing."""

from __future__ import annotations

import torch
from torch import Tensor

AHEAD = 256  # steps of the future that count, where nothing else is said
LEAST_REST = 0.1  # attention to all other rows; less counts as this much, so that no row costs a thousand times more


def output_changes(attention: Tensor, output: Tensor, value: Tensor) -> Tensor:
    """The squared change of each query's output when one row is missing: [B, H, T, C].

    attention [B, H, T, C] of the queries to these rows, output [B, H, T, Dv] of the queries, value [B, H, C, Dv].
    Without a row, the attention to all others grows by 1 / (1 - attention), so that the output moves away from the
    row's value by attention / (1 - attention) times their distance.
    """
    squares = value.square().sum(-1)[..., None, :] + output.square().sum(-1, keepdim=True)
    distance = (squares - 2 * torch.matmul(output, value.mT)).clamp(min=0)
    share = attention / (1 - attention).clamp(min=LEAST_REST)
    return share.square() * distance


def sum_changes(attention: Tensor, output: Tensor, value: Tensor) -> Tensor:
    """The changes of `output_changes`, summed over queries: [B, H, C]."""
    return output_changes(attention, output, value).sum(-2)
