"""A step of vLLM on a GPU: its decode steps as one batch, and its prompts in batches of one width.

All tensors are on the device. Those of decode steps keep their addresses from step to step, for CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from msrnn.integrations.vllm_page_check import NO_PAGE
from msrnn.integrations.vllm_pages import group_widths

TOGETHER = 16  # prompts that are read at once; each needs some 12 MB in a layer of 32 heads


@dataclass(frozen=True)
class Steps:
    """One new token each, for the first n requests of the batch, which have its first n tokens."""

    pages: Tensor  # [n] int64
    position: Tensor  # [n] int32, -1 for padding


@dataclass(frozen=True)
class Prompts:
    """Several new tokens each, for p requests, padded to W tokens."""

    pages: Tensor  # [p] int64
    position: Tensor  # [p, W] int32, -1 for padding, which comes last
    tokens: Tensor  # [p, W] int64: which tokens of the step they are; some other one for padding
    sources: Tensor  # [k] int64: which of the p * W are no padding
    targets: Tensor  # [k] int64: which tokens of the step these are


class StepBuffers:
    """The tensors that captured graphs of decode steps read."""

    def __init__(self, most: int, device: torch.device) -> None:
        self._pages = torch.zeros(most, dtype=torch.int64, device=device)
        self._position = torch.full((most,), -1, dtype=torch.int32, device=device)

    def fill(self, pages: Tensor, starts: Tensor, ends: Tensor) -> Steps:
        """pages [n] of requests whose tokens begin at starts [n + 1] of the step, and which have ends [n] after it.

        Padding has no page, or no tokens.
        """
        n = len(pages)
        real = (pages != NO_PAGE) & (starts[1:] - starts[:-1] == 1)
        self._pages[:n].copy_(pages)
        self._position[:n].copy_((ends - 1).masked_fill(~real, -1))
        return Steps(self._pages[:n], self._position[:n])


def count_steps(lengths: Sequence[int]) -> int:
    """How many requests at the beginning of a batch have one new token, with padding, if nothing else comes after them.

    Each of these has the token of its own index.
    """
    ones = next((index for index, length in enumerate(lengths) if length != 1), len(lengths))
    return ones if any(lengths[ones:]) else len(lengths)


def gather_prompts(
    pages: Tensor, first: int, starts: Sequence[int], begins: Sequence[int], ends: Sequence[int]
) -> tuple[Prompts, ...]:
    """Those of the requests from `first` on; pages [n] is on the device, the others are lists of all n requests."""
    members = [index for index in range(first, len(begins)) if ends[index] > begins[index]]
    lengths = [ends[index] - begins[index] for index in members]
    found = []
    for width, chosen in group_widths(lengths, TOGETHER):
        rows = np.array([members[index] for index in chosen])
        length = np.array([lengths[index] for index in chosen])[:, None]
        column = np.arange(width)[None]
        real = column < length
        tokens = np.where(real, np.array(starts)[rows][:, None] + column, 0)
        position = np.where(real, np.array(begins)[rows][:, None] + column, -1)
        sources = np.flatnonzero(real)
        parts = [rows, position.ravel(), tokens.ravel(), sources, tokens.ravel()[sources]]
        numbers, *parted = _upload(parts, pages.device)
        shaped = [part.view(len(chosen), width) for part in parted[:2]]
        own = pages.index_select(0, numbers).long()
        found.append(Prompts(own, shaped[0].int(), shaped[1], *parted[2:]))
    return tuple(found)


def _upload(parts: Sequence[Any], device: torch.device) -> list[Tensor]:
    """Arrays of integers as tensors on the device, in one copy that the host does not wait for."""
    together = torch.from_numpy(np.concatenate(parts).astype(np.int64))
    if device.type == "cuda":
        together = together.pin_memory()
    return [*together.to(device, non_blocking=True).split([len(part) for part in parts])]
