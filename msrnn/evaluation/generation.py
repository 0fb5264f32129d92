"""Answers of an engine as rows, each as soon as it is finished."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import NamedTuple

import torch

from msrnn.engine.engine import Engine
from msrnn.engine.requests import SamplingParams
from msrnn.errors import UsageError
from msrnn.evaluation.runner import OnTokens
from msrnn.hf.rnn import MultiStateRNN


class Answered(NamedTuple):
    """The answer to one prompt of a list."""

    number: int  # of the prompt, from 0 on
    tokens: list[int]
    seconds: float  # since the answer before it was finished; their sum is the time that all have taken


def one_by_one(
    rnn: MultiStateRNN, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], on_tokens: OnTokens
) -> Iterator[Answered]:
    """Answer each prompt alone, greedily: the full model reads long prompts faster so than in an engine."""
    for number, (prompt, how) in enumerate(zip(prompts, params, strict=True)):
        began = perf_counter()
        ids = torch.tensor([prompt], device=rnn.device)
        out = rnn.generate(ids, max_new_tokens=how.max_tokens, do_sample=False, eos_token_id=list(how.stop_token_ids))
        tokens = out[0, len(prompt) :].tolist()
        if tokens and tokens[-1] in how.stop_token_ids:
            tokens.pop()
        on_tokens(len(prompt) + how.max_tokens)
        yield Answered(number, tokens, perf_counter() - began)


def answered(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    on_tokens: OnTokens,
) -> Iterator[Answered]:
    """Answer all prompts, each as it finishes.

    `on_tokens` counts the tokens of each prompt, and `max_tokens` for each answer, even where it is shorter.
    """
    last = perf_counter()
    for number, request in engine.answers(prompts, params, on_tokens):
        (answer,) = request.answers
        if answer.error:
            raise UsageError(f"prompt {number + 1} of {len(prompts)}: {answer.error}; compute it in another dtype")
        on_tokens(request.params.max_tokens - len(answer.tokens))
        now = perf_counter()
        yield Answered(number, answer.tokens, now - last)
        last = now
