"""The loss of each token of a text, and the KV rows that are held after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from msrnn.core.state import MultiState
from msrnn.hf.rnn import MultiStateRNN

LOGIT_BYTES = {"cpu": 2**26, "cuda": 2**30}  # logits that exist at once, in the model's dtype and again in float32


def losses(
    rnn: MultiStateRNN, input_ids: Tensor, state: MultiState, on_block: Callable[[int], None] | None = None
) -> Tensor:
    """ids [B, T] -> negative log-likelihoods [B, T - 1], float32, of every token but the first of these.

    The state reads all tokens but the last, block by block, so that the logits of a long text never exist all at once.
    Where the RNN has an archive, every token recalls.
    """
    input_ids, last = input_ids.to(rnn.model.device), input_ids.shape[1] - 1
    every = None if rnn.spec.recall is None else rnn.recall_while_reading or rnn.spec.recall.every
    columns = _columns(rnn, input_ids.shape[0])
    if every is not None:
        columns = -(-columns // every) * every  # blocks that recall together are read in one call
    parts = []
    for start in range(0, last, columns):
        stop = min(start + columns, last)
        logits = rnn.read(input_ids[:, start:stop], state, on_block=on_block, recall_every=every)
        parts.append(compute_losses(logits, input_ids[:, start + 1 : stop + 1]))
    return torch.cat(parts, dim=1)


def _columns(rnn: MultiStateRNN, rows: int) -> int:
    """Tokens of each row that are read in one call: whole blocks, at least one."""
    vocabulary: Any = rnn.model.get_input_embeddings().num_embeddings
    column: int = rows * int(vocabulary) * rnn.model.dtype.itemsize
    return max(1, _logit_bytes(rnn.model.device) // column // rnn.block) * rnn.block


def _logit_bytes(device: torch.device) -> int:
    return LOGIT_BYTES.get(device.type, 2**28)


def compute_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Logits [B, T, V] and targets [B, T] -> negative log-likelihoods [B, T], float32; few logits at once."""
    tokens = max(1, _logit_bytes(logits.device) // (4 * logits.shape[-1]))
    slices = zip(logits.flatten(0, 1).split(tokens), targets.flatten().split(tokens), strict=True)
    return torch.cat([cross_entropy(some.float(), true, reduction="none") for some, true in slices]).view_as(targets)


def count_most_rows(state: MultiState) -> int:
    """The most KV rows that a head of any layer holds."""
    return max(count_rows(state))


def count_rows(state: MultiState) -> list[int]:
    """The most KV rows that a head holds, for each layer."""
    return [int((layer.position >= 0).sum(-1).max()) for layer in state.layers if hasattr(layer, "position")]
