"""How an extrapolation reads a text: in legs, after which the state is saved, and in windows with a loss each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from msrnn.core.state import MultiState
from msrnn.evaluation.loss import losses
from msrnn.hf.rnn import MultiStateRNN


class Course(NamedTuple):
    """How a text of `tokens` is read: in windows, end to end, and in legs of several windows."""

    tokens: int
    given: int  # tokens at the start that are not predicted
    window: int
    leg: int  # tokens of a leg, a multiple of the window

    @property
    def counts(self) -> list[int]:
        """Predicted tokens of each window."""
        starts = range(0, self.tokens, self.window)
        return [min(self.window, self.tokens - a) - (self.given if a == 0 else 0) for a in starts]

    def legs(self, start: int = 0) -> Iterator[tuple[int, int]]:
        """First token and end of each leg, from the leg that begins at `start` on."""
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

    Before the leg, the state has read all earlier tokens but the last; after it, all but the last token of the leg.
    """
    start, stop = leg
    part = losses(rnn, input_ids[:, max(0, start - 1) : stop], state, on_block).cpu().double()
    nll = torch.zeros(len(input_ids), stop - start, dtype=torch.float64)
    nll[:, nll.shape[1] - part.shape[1] :] = part
    if start == 0:
        nll[:, : course.given] = 0.0
    return torch.stack([window.sum(-1) for window in nll.split(course.window, dim=1)], dim=1).tolist()
