"""`scan_triton` as a scan of scores: their exponentials are taken before it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from msrnn.backends.triton.scan import room, scan_triton
from msrnn.bound import Bound


def scan_by_weights(
    scores: Tensor,
    position: Tensor,
    importance: Tensor,
    query_position: Tensor,
    bound: Bound,
    sinks: Tensor | None = None,
    row_weight: Tensor | None = None,
    protected: Tensor | None = None,
    fewer: Tensor | None = None,
) -> Tensor:
    """The arguments of `scan_torch`; scores stay as they are. The kernel runs on a GPU where there is one."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    seen = (position[:, :, None, None] >= 0) & (position[:, :, None, None] <= query_position[:, None, None, :, None])
    visible = scores.masked_fill(~seen, -torch.inf)
    top = visible.amax(-1, keepdim=True).clamp(min=-1e30)
    space = room(query_position.shape[1], position.shape[2])
    spare = (0, 0, 0, space.rows - query_position.shape[1])
    weights = (visible - top).exp().transpose(2, 3).to(where)
    weights = pad(weights, (0, space.width - position.shape[2], *spare), value=torch.nan).contiguous()
    sink = None
    if sinks is not None:
        sink = pad((sinks - top[..., 0]).exp().transpose(2, 3), spare).contiguous().to(where)
    there = [t.to(where).contiguous() for t in (position, importance, query_position)]
    own = [None if tensor is None else tensor.to(where) for tensor in (row_weight, protected, fewer)]
    evicted_at = scan_triton(weights, there[0], there[1], there[2], bound, sink, *own)
    importance.copy_(there[1])
    return evicted_at.to(scores.device)
