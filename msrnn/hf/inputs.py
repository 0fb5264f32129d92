"""Tokens and masks that a `MultiStateRNN` is given: what cannot be read is refused before anything is read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.core.device_memory import send
from msrnn.core.state import MultiState
from msrnn.errors import UsageError
from msrnn.hf.state_spec import StateSpec

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_input(
    model: PreTrainedModel, spec: StateSpec, input_ids: Tensor, state: MultiState, attention_mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Ids and mask on the model's device, the mask only where there is padding. Refuses what cannot be read."""
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in _INTEGERS:
        kind = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise TypeError(f"input_ids of {kind}: must be a tensor of integers, [batch, tokens]")
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        raise UsageError(f"input_ids of shape {list(input_ids.shape)}: must be [batch, tokens], 1 token or more")
    if not isinstance(state, MultiState):
        raise TypeError(f"state of {type(state).__name__}: must be a MultiState, as rnn.state() makes it")
    state.check_fits(spec.fingerprint)
    spec.check_device(state)
    spec.check_archives(state)
    if input_ids.shape[0] != state.batch_size:
        raise UsageError(
            f"input_ids of {input_ids.shape[0]} sequences do not fit a state of {state.batch_size}: "
            "use a state of the same batch size"
        )
    if spec.recall is not None and spec.hybrid and state.batch_size > 1:
        raise UsageError(
            f"a state of {state.batch_size} sequences: with recall, each is read alone, and the linear-attention "
            "layers of this model cannot be; select one"
        )
    state.check_room(input_ids.shape[1])
    spec.check_gaps(state.columns + input_ids.shape[1])
    spec.check_autocast()
    vocabulary: Any = model.get_input_embeddings().num_embeddings
    if input_ids.device.type == "cpu":
        low, high = int(input_ids.min()), int(input_ids.max())
        if low < 0 or high >= vocabulary:
            raise UsageError(
                f"input_ids from {low} to {high}: this model has ids 0 to {vocabulary - 1}; use its own tokenizer"
            )
    if attention_mask is not None:
        attention_mask = torch.as_tensor(attention_mask, device=input_ids.device)
        if attention_mask.shape != input_ids.shape:
            raise UsageError(
                f"attention_mask of shape {list(attention_mask.shape)}: must cover the {list(input_ids.shape)} "
                "columns of input_ids, no more and no fewer"
            )
        attention_mask = None if bool(attention_mask.all()) else send((attention_mask != 0).long(), model.device)
    if attention_mask is not None and spec.hybrid and bool((state.seen > 0).any()):
        raise UsageError(
            "attention_mask: the linear-attention layers of this model also read padding, unless it comes first; "
            "select the sequences and read each alone"
        )
    input_ids = send(input_ids.long(), model.device)
    if spec.model.last_position is not None:
        spec.check_position(int(positions_of(state.seen, input_ids, attention_mask).max()))
    return input_ids, attention_mask


def positions_of(seen: Tensor, input_ids: Tensor, mask: Tensor | None) -> Tensor:
    """The position of each column in its sequence; padding gets that of the token before it, and is not read."""
    columns = torch.ones_like(input_ids) if mask is None else mask
    return (seen.to(input_ids.device)[:, None] + columns.cumsum(-1) - 1).clamp(min=0)


def count_tokens(input_ids: Tensor, mask: Tensor | None) -> Tensor:
    """The tokens of each sequence, without padding: [B]"""
    return torch.full(input_ids.shape[:1], input_ids.shape[1]) if mask is None else mask.sum(-1)


def split_at_blocks(input_ids: Tensor, first: int, every: int, most: int) -> list[Tensor]:
    """Ids [1, T] from position `first` on, in pieces of about `most` columns that begin at multiples of `every`."""
    width = max(1, most // every) * every
    until_first = min(input_ids.shape[1], -first % every)
    pieces = [input_ids[:, :until_first]] if until_first else []
    return [*pieces, *(piece for piece in input_ids[:, until_first:].split(width, 1) if piece.shape[1])]
