"""A text read in legs: what each window of its tokens costs, from a state that is carried from leg to leg."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from msrnn.core.state import MultiState
from msrnn.evaluation.loss import losses
from msrnn.hf.rnn import MultiStateRNN


class Course(NamedTuple):
    """How a text of `tokens` is read: its windows lie end to end, and a leg is some windows."""

    tokens: int
    given: int  # tokens at the start that nothing predicts
    window: int
    leg: int  # tokens, whole windows of them

    @property
    def counts(self) -> list[int]:
        """Tokens that are predicted in each window."""
        starts = range(0, self.tokens, self.window)
        return [min(self.window, self.tokens - a) - (self.given if a == 0 else 0) for a in starts]

    def legs(self, start: int = 0) -> Iterator[tuple[int, int]]:
        """From a token that begins a leg on."""
        return ((a, min(a + self.leg, self.tokens)) for a in range(start, self.tokens, self.leg))


def leg_nll(
    rnn: MultiStateRNN,
    input_ids: Tensor,
    state: MultiState,
    course: Course,
    leg: tuple[int, int],
    on_block: Callable[[int], None] | None = None,
) -> list[list[float]]:
    """Texts [B, T] -> the summed negative log-likelihood of each window of the leg, for each text.

    The state has read all but the last token before the leg, and then has read all but the leg's last.
    """
    start, stop = leg
    part = losses(rnn, input_ids[:, max(0, start - 1) : stop], state, on_block).cpu().double()
    nll = torch.zeros(len(input_ids), stop - start, dtype=torch.float64)
    nll[:, nll.shape[1] - part.shape[1] :] = part
    if start == 0:
        nll[:, : course.given] = 0.0
    return torch.stack([window.sum(-1) for window in nll.split(course.window, dim=1)], dim=1).tolist()
