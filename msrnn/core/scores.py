"""How a model turns queries and keys into scores before the softmax."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from msrnn.core.rope import Repositioning


@dataclass(frozen=True)
class Scoring:
    """Scaling, soft cap, attention sinks and repositioning of one layer."""

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None  # [H]: the learned attention sinks of gpt-oss, which are not states
    repositioning: Repositioning | None = None  # new positions for the kept tokens; None: the model's own

    def __call__(self, query: Tensor, keys: Tensor) -> Tensor:
        """query [B, K, Q, D], keys [B, K, N, D] -> [B, K, Q, N] float32."""
        scores = torch.matmul(query, keys.mT).float().mul_(self.scale)
        return scores if self.softcap is None else scores.div_(self.softcap).tanh_().mul_(self.softcap)

    def sinks_of(self, groups: int) -> Tensor | None:
        """[G, M] float32."""
        return None if self.sinks is None else self.sinks.detach().float().reshape(groups, -1)
