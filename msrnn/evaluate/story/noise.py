"""Sampling as noise: added to the logits before the likeliest token is taken, and each story has its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Noise:
    """Chooses tokens for rows of logits; which, depends on a row's seed and on its logits, and on no other row.

    The argmax of logits and Gumbel noise is a sample of their softmax. Drawn on the CPU: the same on any device.
    """

    def __init__(self, seeds: Sequence[int], temperature: float) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.temperature = temperature

    def __call__(self, logits: Tensor) -> Tensor:
        """[B, V] -> [B]"""
        drawn = [torch.empty(logits.shape[1]).exponential_(generator=generator) for generator in self.generators]
        noise = torch.stack(drawn).log_().neg_()
        return (logits.float() / self.temperature + noise.to(logits.device)).argmax(-1)
