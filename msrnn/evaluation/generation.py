"""Answers of an engine, each as soon as it is finished."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import NamedTuple

import torch

from msrnn.engine.engine import Engine
from msrnn.engine.requests import SamplingParams
from msrnn.errors import UsageError
from msrnn.evaluation.task import OnTokens
from msrnn.hf.rnn import MultiStateRNN


class Answer(NamedTuple):
    """The answer to one prompt of a list."""

    number: int  # of the prompt, from 0 on
    tokens: list[int]
    seconds: float  # since the answer before it was finished; their sum is the time that all have taken


def answer_in_batches(
    rnn: MultiStateRNN,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    batch: int,
    on_tokens: OnTokens,
) -> Iterator[Answer]:
    """Answer prompts greedily, `batch` at once, each batch read together and padded on the left.

    For the full model on long prompts: its cache grows, while an engine's slots are as many as its longest text needs.
    """
    for start in range(0, len(prompts), batch):
        began, some, how = perf_counter(), prompts[start : start + batch], params[start : start + batch]
        said = _greedy(rnn, some, how)
        seconds = (perf_counter() - began) / len(some)
        for row, tokens in enumerate(said):
            on_tokens(len(some[row]) + how[row].max_tokens)
            yield Answer(start + row, tokens, seconds)


def _greedy(rnn: MultiStateRNN, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
    """The answer of each prompt, without its stop token."""
    columns = max(map(len, prompts))
    ids, mask = torch.zeros(2, len(prompts), columns, dtype=torch.long, device=rnn.device)
    for row, prompt in enumerate(prompts):
        ids[row, columns - len(prompt) :] = torch.tensor(prompt)
        mask[row, columns - len(prompt) :] = 1
    state = rnn.state(len(prompts))
    logits = rnn.read(ids, state, mask, last_only=True)
    said: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(prompts)))
    while True:
        tokens, finite = logits[:, -1].argmax(-1), logits[:, -1].isfinite().all(-1)
        for row, token, fine in zip(range(len(prompts)), tokens.tolist(), finite.tolist(), strict=True):
            if row in running and not fine:
                raise UsageError("the model computed numbers that are not finite; compute it in another dtype")
            if row in running and token not in params[row].stop_token_ids:
                said[row].append(token)
            if token in params[row].stop_token_ids or len(said[row]) == params[row].max_tokens:
                running.discard(row)
        if not running:
            return said
        logits = rnn.step(tokens[:, None], state)


def answer_prompts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    on_tokens: OnTokens,
    protect: Sequence[int] | str = "none",
) -> Iterator[Answer]:
    """Answer all prompts, each as it finishes; `protect` is that of `Engine.answers`.

    `on_tokens` counts the tokens of each prompt, and `max_tokens` for each answer, even where it is shorter.
    """
    last = perf_counter()
    for number, request in engine.answers(prompts, params, on_tokens, protect):
        (answer,) = request.answers
        if answer.error:
            raise UsageError(f"prompt {number + 1} of {len(prompts)}: {answer.error}; compute it in another dtype")
        on_tokens(request.params.max_tokens - len(answer.tokens))
        now = perf_counter()
        yield Answer(number, answer.tokens, now - last)
        last = now
