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


def in_batches(
    rnn: MultiStateRNN,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    batch: int,
    on_tokens: OnTokens,
) -> Iterator[Answered]:
    """Answer prompts greedily, `batch` at once, each batch read together: for the full model, which no engine holds."""
    for start in range(0, len(prompts), batch):
        began, some, how = perf_counter(), prompts[start : start + batch], params[start : start + batch]
        columns = max(map(len, some))
        ids, mask = torch.zeros(2, len(some), columns, dtype=torch.long, device=rnn.device)
        for row, prompt in enumerate(some):
            ids[row, columns - len(prompt) :] = torch.tensor(prompt)
            mask[row, columns - len(prompt) :] = 1
        stops, most = how[0].stop_token_ids, max(one.max_tokens for one in how)
        out = rnn.generate(ids, attention_mask=mask, max_new_tokens=most, do_sample=False, eos_token_id=list(stops))
        seconds = (perf_counter() - began) / len(some)
        for row, (prompt, one) in enumerate(zip(some, how, strict=True)):
            on_tokens(len(prompt) + one.max_tokens)
            said = out[row, columns:].tolist()[: one.max_tokens]
            end = next((i for i, token in enumerate(said) if token in stops), len(said))
            yield Answered(start + row, said[:end], seconds)


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
