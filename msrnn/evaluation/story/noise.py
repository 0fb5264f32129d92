"""Sampling as noise: added to the logits before the likeliest token is taken, and each story has its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor


class Noise:
    """Chooses tokens for rows of logits; which, depends on a row's seed and on its logits, and on no other row.

    The argmax of logits and Gumbel noise is a sample of their softmax. Drawn on the CPU: the same on any device.
    """

    def __init__(self, seeds: Sequence[int], temperature: float, skipped: int = 0) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.threads = ThreadPoolExecutor()
        self.temperature, self.skipped = temperature, skipped  # tokens of each story that are told already

    def __call__(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Logits [B, V] of these stories, by the numbers of their seeds -> [B]"""
        while self.skipped:
            self._drawn(logits.shape[1], rows)
            self.skipped -= 1
        noise = self._drawn(logits.shape[1], rows).log_().neg_().log_().neg_().float()
        return (logits.float() / self.temperature + noise.to(logits.device)).argmax(-1)

    def _drawn(self, vocabulary: int, rows: Sequence[int]) -> Tensor:
        """Uniform; torch's own exponential draws take four times as long. Each row on a thread, with its generator."""
        drawn = torch.empty(len(rows), vocabulary, dtype=torch.float64)
        list(self.threads.map(lambda uniform, row: uniform.uniform_(generator=self.generators[row]), drawn, rows))
        return drawn
