"""What a model says after each of some prompts, token by token, from a state of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from msrnn import turns
from msrnn.rnn import MultiStateRNN

Choose = Callable[[Tensor], Tensor]  # logits [B, V] -> tokens [B]


def likeliest(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def say(
    rnn: MultiStateRNN,
    prompts: Sequence[Sequence[int]],
    ends: set[int],
    most: int,
    choose: Choose = likeliest,
    on_tokens: Callable[[int], object] | None = None,
) -> list[list[int]]:
    """Each row's tokens, at most so many, up to one that ends it and without that one.

    Prompts are read exactly, padded on the left; `on_tokens` is told of padding, too, since it takes as long.
    """
    ids, mask = left_padded(prompts)
    state, rows = rnn.state(len(prompts)), len(prompts)

    def on_columns(columns: int) -> None:
        if on_tokens:
            on_tokens(rows * columns)

    logits = rnn.read(ids, state, mask, last_only=True, on_block=on_columns)
    said: list[list[int]] = [[] for _ in prompts]
    speaking = set(range(rows))
    for step in range(most):
        chosen = choose(logits[:, -1])
        for row, token in enumerate(chosen.tolist()):
            if row in speaking and token in ends:
                speaking.remove(row)
            elif row in speaking:
                said[row].append(token)
        if not speaking or step == most - 1:
            on_columns(most - step)
            break
        on_columns(1)
        logits = rnn.step(chosen[:, None], state)  # rows that have ended go on unheard: shapes stay, and so do graphs
    return said


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, T]; the padding's id is never read."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def prompted(tokenizer: Any, text: str, chat: bool) -> list[int]:
    """A prompt's tokens: by the model's chat template, or the bare text with what the tokenizer puts in front."""
    whole = turns.opening(tokenizer, text) if chat else text
    return list(tokenizer(whole, add_special_tokens=not chat)["input_ids"])


def ends_of(model: PreTrainedModel, tokenizer: Any) -> set[int]:
    """Tokens after which a model has said all: its own, and the tokenizer's."""
    own = getattr(model.generation_config, "eos_token_id", None)
    listed = own if isinstance(own, list) else [own]
    return {token for token in (*listed, tokenizer.eos_token_id) if token is not None}
