"""Generate continuations of many prompts at once. A prefix that prompts share is read once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.core.state import MultiState
from msrnn.hf.rnn import MultiStateRNN

Sampler = Callable[[Tensor, Sequence[int]], Tensor]  # logits [B, V] and the indices of their prompts -> tokens [B]
OnTokens = Callable[[int], object]


def greedy(logits: Tensor, _: Sequence[int]) -> Tensor:
    return logits.argmax(-1)


def generate_batch(
    rnn: MultiStateRNN,
    prompts: Sequence[Sequence[int]],
    stop_tokens: set[int],
    max_new_tokens: int,
    sampler: Sampler = greedy,
    on_tokens: OnTokens = lambda _: None,
) -> list[list[int]]:
    """The tokens that follow each prompt, up to a stop token and without it.

    `on_tokens` counts the tokens of each prompt, and `max_new_tokens` for each answer, even where it is shorter.
    """
    logits, state = _prefill(rnn, prompts, on_tokens)
    generated: list[list[int]] = [[] for _ in prompts]
    rows, stopped = list(range(len(prompts))), set[int]()
    for step in range(max_new_tokens):
        chosen = sampler(logits[:, -1], rows)
        for row, token in zip(rows, chosen.tolist(), strict=True):
            if row not in stopped and token in stop_tokens:
                stopped.add(row)
            elif row not in stopped:
                generated[row].append(token)
        if len(stopped) == len(prompts) or step == max_new_tokens - 1:
            on_tokens(len(prompts) * (max_new_tokens - step))
            break
        on_tokens(len(prompts))
        running = [i for i, row in enumerate(rows) if row not in stopped]
        # On a GPU stopped rows stay: captured graphs have a fixed shape. On a CPU, removing half the rows saves time.
        if 2 * len(running) <= len(rows) and chosen.device.type == "cpu":
            rows, chosen, state = [rows[i] for i in running], chosen[running], state.select(running)
        logits = rnn.step(chosen[:, None], state)
    return generated


def _prefill(rnn: MultiStateRNN, prompts: Sequence[Sequence[int]], on_tokens: OnTokens) -> tuple[Tensor, MultiState]:
    """Read the prompts: the logits after each, and the state. Rows are padded on the left."""
    groups = prefix_groups(prompts)
    state = rnn.state(len(groups))
    prefixes = [prompts[group.rows[0]][: group.shared] for group in groups]
    if any(prefixes):
        ids, mask = left_padded(prefixes)
        tokens = sum(group.shared * len(group.rows) for group in groups)
        rnn.read(ids, state, mask, last_only=True, on_block=_scaled(tokens, ids.shape[1], on_tokens))
    group_of = {row: number for number, group in enumerate(groups) for row in group.rows}
    state = rnn._select(state, [group_of[row] for row in range(len(prompts))])
    rests = [prompt[groups[group_of[row]].shared :] for row, prompt in enumerate(prompts)]
    ids, mask = left_padded(rests)
    on_block = _scaled(sum(len(rest) for rest in rests), ids.shape[1], on_tokens)
    return rnn.read(ids, state, mask, last_only=True, on_block=on_block), state


def _scaled(tokens: int, columns: int, on_tokens: OnTokens) -> Callable[[int], None]:
    """A callback for blocks of columns that counts `tokens` in all."""
    done = 0

    def on_block(more: int) -> None:
        nonlocal done
        on_tokens(tokens * (done + more) // columns - tokens * done // columns)
        done += more

    return on_block


class PrefixGroup(NamedTuple):
    """Prompts that begin with the same tokens, as questions on one document do."""

    rows: list[int]
    shared: int  # tokens of the shared prefix, which is shorter than each of the prompts


def prefix_groups(prompts: Sequence[Sequence[int]]) -> list[PrefixGroup]:
    """Every prompt in one group: neighbours in sorted order whose common prefix is half of the shorter one or more."""
    groups: list[PrefixGroup] = []
    for row in sorted(range(len(prompts)), key=lambda row: list(prompts[row])):
        alone = PrefixGroup([row], len(prompts[row]) - 1)
        if groups:
            before, shared = groups[-1], _common_prefix(prompts[groups[-1].rows[-1]], prompts[row])
            if 2 * shared >= min(len(prompts[before.rows[-1]]), len(prompts[row])):
                groups[-1] = PrefixGroup([*before.rows, row], min(before.shared, shared, alone.shared))
                continue
        groups.append(alone)
    return groups


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, T]; the id of padding is never read."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def full_model_rnn(model: PreTrainedModel, tokens: int) -> MultiStateRNN:
    """The full model on at most `tokens` tokens, in slots of a fixed size: a GPU captures its steps."""
    return MultiStateRNN(model, "window", tokens)
