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
    # Attention sinks, which take part in the softmax and are not states. [H]: the learned ones of gpt-oss. [B, H, C]
    # float32: one for each query, -inf where it has none.
    sinks: Tensor | None = None
    repositioning: Repositioning | None = None  # new positions for the kept tokens; None: the model's own

    def __call__(self, query: Tensor, keys: Tensor) -> Tensor:
        """query [B, K, Q, D], keys [B, K, N, D] -> [B, K, Q, N] float32."""
        return self.scale_products(torch.matmul(query, keys.mT))

    def scale_products(self, products: Tensor) -> Tensor:
        """The scores of products of queries and keys."""
        scores = products.float().mul_(self.scale)
        return scores if self.softcap is None else scores.div_(self.softcap).tanh_().mul_(self.softcap)

    def sinks_of(self, batch: int, groups: int, columns: int) -> Tensor | None:
        """[B, G, M, C] float32; learned sinks have stride 0 along B and C."""
        if self.sinks is None:
            return None
        sinks = self.sinks.detach().float()
        sinks = sinks[:, None] if sinks.dim() == 1 else sinks
        sinks = sinks.expand(batch, -1, columns)
        return sinks.view(batch, groups, -1, columns)
