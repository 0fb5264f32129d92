"""What a model says after each of some prompts, token by token, from a state of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.core.state import MultiState
from msrnn.evaluation.kin import families
from msrnn.hf import chat_template as turns
from msrnn.hf.rnn import MultiStateRNN

Choose = Callable[[Tensor, Sequence[int]], Tensor]  # logits [B, V] and the prompts they follow -> tokens [B]


def likeliest(logits: Tensor, _: Sequence[int]) -> Tensor:
    return logits.argmax(-1)


def say(
    rnn: MultiStateRNN,
    prompts: Sequence[Sequence[int]],
    ends: set[int],
    most: int,
    choose: Choose = likeliest,
    on_tokens: Callable[[int], object] = lambda _: None,
) -> list[list[int]]:
    """What follows each prompt: at most so many tokens, up to one that ends it and without that one.

    `on_tokens` is told of each prompt's tokens and of `most` for each answer, however few were needed.
    """
    logits, state = _read(rnn, prompts, on_tokens)
    said: list[list[int]] = [[] for _ in prompts]
    rows, ended = list(range(len(prompts))), set[int]()
    for step in range(most):
        chosen = choose(logits[:, -1], rows)
        for row, token in zip(rows, chosen.tolist(), strict=True):
            if row not in ended and token in ends:
                ended.add(row)
            elif row not in ended:
                said[row].append(token)
        if len(ended) == len(prompts) or step == most - 1:
            on_tokens(len(prompts) * (most - step))
            break
        on_tokens(len(prompts))
        going = [i for i, row in enumerate(rows) if row not in ended]
        # On a GPU, who has ended goes on unheard: shapes stay, and so do graphs. On a CPU, every row costs.
        if 2 * len(going) <= len(rows) and chosen.device.type == "cpu":
            rows, chosen, state = [rows[i] for i in going], chosen[going], state.select(going)
        logits = rnn.step(chosen[:, None], state)
    return said


def _read(
    rnn: MultiStateRNN, prompts: Sequence[Sequence[int]], on_tokens: Callable[[int], object]
) -> tuple[Tensor, MultiState]:
    """Prompts read exactly, padded on the left: the logits after each, and the state. What some share is read once."""
    kin = families(prompts)
    state = rnn.state(len(kin))
    beginnings = [prompts[family.rows[0]][: family.shared] for family in kin]
    if any(beginnings):
        ids, mask = left_padded(beginnings)
        tokens = sum(family.shared * len(family.rows) for family in kin)
        rnn.read(ids, state, mask, last_only=True, on_block=_in_parts(tokens, ids.shape[1], on_tokens))
    family_of = {row: number for number, family in enumerate(kin) for row in family.rows}
    state = rnn._select(state, [family_of[row] for row in range(len(prompts))])
    rests = [prompt[kin[family_of[row]].shared :] for row, prompt in enumerate(prompts)]
    ids, mask = left_padded(rests)
    on_block = _in_parts(sum(len(rest) for rest in rests), ids.shape[1], on_tokens)
    return rnn.read(ids, state, mask, last_only=True, on_block=on_block), state


def _in_parts(tokens: int, columns: int, on_tokens: Callable[[int], object]) -> Callable[[int], None]:
    """Tells of so many tokens while so many columns are read."""
    done = 0

    def on_block(more: int) -> None:
        nonlocal done
        on_tokens(tokens * (done + more) // columns - tokens * done // columns)
        done += more

    return on_block


def roomy(model: PreTrainedModel, tokens: int) -> MultiStateRNN:
    """The unbounded model on so many tokens, by a bounded one's kernels: one shape, so a GPU captures its steps."""
    return MultiStateRNN(model, "window", tokens)


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
