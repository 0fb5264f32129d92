"""Where each row of a generation ended: what comes after is there to fill it up, and nobody said it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList, StopStringCriteria


class Ends(StoppingCriteria):
    """The criteria that a call brings, and how many columns each row had when they first ended it."""

    def __init__(self, kwargs: dict[str, Any], strings: str | list[str] | None) -> None:
        self.own = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
        tokenizer = kwargs.get("tokenizer")
        # transformers looks for these by itself, and tells nobody.
        self.strings = StopStringCriteria(tokenizer, strings) if strings and tokenizer is not None else None
        self.columns: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        stop: Tensor = self.own(input_ids, scores, **kwargs)
        ended = stop if self.strings is None else stop | self.strings(input_ids, scores, **kwargs)
        if self.columns is None:
            self.columns = torch.full_like(ended, torch.iinfo(torch.int64).max, dtype=torch.int64)
        self.columns = torch.where(ended, self.columns.clamp(max=input_ids.shape[1]), self.columns)
        return stop


def spoken(generated: Tensor, eos: int | list[int] | None, pad: int | None, columns: Tensor | None = None) -> Tensor:
    """[B, N], 0 where `generate` filled up a row that had already ended: after its first eos, trailing pads, and after
    so many `columns` [B], where these are known."""
    real = torch.ones_like(generated)
    if eos is not None:
        ended = torch.isin(generated, torch.as_tensor(eos, device=generated.device)).long()
        real *= (ended.cumsum(-1) - ended) == 0
        if pad is not None:
            trailing = (generated == pad).flip(-1).long().cumprod(-1).flip(-1)
            real *= (trailing == 0) | (ended == 1)
    if columns is not None:
        real *= torch.arange(generated.shape[1], device=generated.device) < columns[:, None]
    return real
