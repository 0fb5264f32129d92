"""Where each sequence of one call of `generate` ends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from msrnn.hf.generation_settings import Settings

_WHOLE_BATCH = (MaxLengthCriteria, MaxTimeCriteria)  # end all sequences at once


class SequenceEnds(StoppingCriteria):
    """The caller's stopping criteria; records the length at which each sequence first ended, by these or by a stop
    token."""

    def __init__(self, settings: Settings) -> None:
        given = StoppingCriteriaList(settings["stopping_criteria"] or [])
        defaults = (*_WHOLE_BATCH, EosTokenCriteria, StopStringCriteria)
        self.own = StoppingCriteriaList([criterion for criterion in given if not isinstance(criterion, defaults)])
        # transformers replaces its own criteria by given ones of the same kind, so those are passed on unchanged.
        self.beside = [criterion for criterion in given if isinstance(criterion, defaults)]
        self.watched: list[Any] = [criterion for criterion in self.beside if not isinstance(criterion, _WHOLE_BATCH)]
        eos, strings, tokenizer = settings["eos_token_id"], settings["stop_strings"], settings["tokenizer"]
        kinds = {type(criterion) for criterion in given}  # a given criterion replaces the configured one of its type
        if eos is not None and EosTokenCriteria not in kinds:
            self.watched.append(EosTokenCriteria(eos))
        if strings and tokenizer is not None and StopStringCriteria not in kinds:
            self.watched.append(StopStringCriteria(tokenizer, strings))
        self.columns: Tensor | None = None  # [B]: lengths with the stop token; a huge number: not ended

    @property
    def criteria(self) -> StoppingCriteriaList:
        return StoppingCriteriaList([*self.beside, self])

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        stop: Tensor = self.own(input_ids, scores, **kwargs)
        ended = stop.clone()
        for criterion in self.watched:
            ended |= criterion(input_ids, scores, **kwargs)
        if self.columns is None:
            self.columns = torch.full_like(ended, torch.iinfo(torch.int64).max, dtype=torch.int64)
        self.columns = torch.where(ended, self.columns.clamp(max=input_ids.shape[1]), self.columns)
        return stop


def mask_generated(out: Any, prompt: int, ends: SequenceEnds | None) -> Tensor:
    """The mask [B, N]: 1 for a generated token, 0 for the padding of a sequence that ended before the others.

    out: generate's result with all its fields. The lengths of beams are in it; otherwise `ends` has them.
    """
    generated: Tensor = out.sequences[:, prompt:]
    columns = torch.arange(generated.shape[1], device=generated.device)
    if getattr(out, "beam_indices", None) is not None:
        lengths: Tensor = (out.beam_indices >= 0).sum(-1)
    elif ends is not None and ends.columns is not None:
        lengths = ends.columns.to(generated.device) - prompt
    else:
        return torch.ones_like(generated)
    return (columns < lengths[:, None]).long()
