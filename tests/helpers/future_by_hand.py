"""The true future by its definition: slow loops over tokens, and a Llama model layer by layer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.core.change import LEAST_REST


def evict_slowly(changes: Tensor, size: int, ahead: int | None, recent: int = 0) -> list[int]:
    """Changes [T, T] of each query without each row -> the step that evicts each row; T: it never leaves."""
    T, numbers = len(changes), changes.tolist()
    held, evicted_at = list[int](), [T] * T
    for t in range(T):
        held.append(t)
        if len(held) > size:
            stop = T if ahead is None else min(T, t + ahead + 1)
            ranks = {j: sum(numbers[s][j] for s in range(t + 1, stop)) for j in held if j <= t - recent}
            leaves = min(ranks, key=lambda j: (ranks[j], j))
            held.remove(leaves)
            evicted_at[leaves] = t
    return evicted_at


def mask_of(evicted_at: list[int]) -> Tensor:
    """[T, T], 0 where a query sees a row and -inf elsewhere."""
    T = len(evicted_at)
    return torch.tensor([[0.0 if j <= t <= evicted_at[j] else -math.inf for j in range(T)] for t in range(T)])


def change_of_queries(attention: Tensor, value: Tensor) -> Tensor:
    """attention [H, T, T] and value [H, T, D] -> the change of each query without each row, over all heads, [T, T]."""
    found = torch.zeros(attention.shape[1:], dtype=torch.float64)
    for a, v in zip(attention.double(), value.double(), strict=True):
        distance = ((a @ v)[:, None] - v).square().sum(-1)
        found += (a / (1 - a).clamp(min=LEAST_REST)).square() * distance
    return found


@torch.no_grad()
def read_by_hand(
    model: PreTrainedModel, ids: Tensor, sizes: list[int], ahead: int | None
) -> tuple[Tensor, list[list[int]]]:
    """One text [T] through a Llama model, a layer after the other; each has a size of its own.

    -> logits [T, V], and the eviction times of each layer.
    """
    model.set_attn_implementation("eager")
    decoder: Any = model.model
    T, hidden, times = len(ids), decoder.embed_tokens(ids[None]), list[list[int]]()
    rotary = decoder.rotary_emb(hidden, torch.arange(T)[None])
    for layer, size in zip(decoder.layers, sizes, strict=True):
        normed, module = layer.input_layernorm(hidden), layer.self_attn
        attention = module(normed, position_embeddings=rotary, attention_mask=mask_of([T] * T)[None, None])[1]
        value = module.v_proj(normed).view(T, -1, module.head_dim).transpose(0, 1)
        value = value.repeat_interleave(attention.shape[1] // len(value), 0)
        times.append(evict_slowly(change_of_queries(attention[0], value), size, ahead))
        mask = mask_of(times[-1])[None, None].to(hidden.dtype)
        hidden = hidden + module(normed, position_embeddings=rotary, attention_mask=mask)[0]
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    head: Any = model.lm_head
    return head(decoder.norm(hidden))[0], times
