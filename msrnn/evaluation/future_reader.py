"""Read chunks of text with a model whose layers evict by the true future, in one forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.core.device_memory import available_bytes, check_fits
from msrnn.core.scores import Scoring
from msrnn.errors import UsageError
from msrnn.evaluation.future import MATRICES, Future, attend
from msrnn.evaluation.loss import compute_losses
from msrnn.evaluation.task import OnTokens
from msrnn.hf.cache_layers import OwnedCache, OwnedLayer
from msrnn.hf.handover import msrnn_attention
from msrnn.hf.inspect import inspect_model

BYTES = {"cpu": 2**28, "cuda": 2**34}  # of chunks that are read together: on a GPU they share the launches of a scan


class FutureLayer(OwnedLayer):
    """A cache layer that reads whole texts and keeps nothing but their eviction times."""

    evicted_at: Tensor  # [B, T]

    def __init__(self, config: Any, future: Future) -> None:
        super().__init__(config)
        self.future = future

    def get_seq_length(self) -> int:
        return 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, scoring: Scoring) -> Tensor:
        for what, given in (("a soft cap", scoring.softcap), ("attention sinks", scoring.sinks)):
            if given is not None:
                raise _refuse(f"is not defined for {what}, which this model adds to its scores")
        if real is not None and not bool(real.all()):
            raise _refuse("is not defined for padding")
        output, self.evicted_at = attend(query, key, value, scoring, self.future)
        return output


class FutureReader:
    """Reads chunks by the true future; the first `opening` tokens of a chunk are not predicted."""

    def __init__(self, model: PreTrainedModel, future: Future, opening: int) -> None:
        _check_model(model)
        self.model, self.future, self.opening = model, future, opening

    def nll(self, input_ids: Tensor, on_tokens: OnTokens | None = None) -> list[float]:
        """Chunks [B, T] -> the negative log-likelihood of each, summed over its predicted tokens."""
        total = list[float]()
        for ids in input_ids.split(self.count_chunks(input_ids.shape[1])):
            predicted = self.losses(ids)[:, max(1, self.opening) - 1 :]
            total += predicted.double().sum(-1).tolist()
            if on_tokens:
                on_tokens(ids[:, 1:].numel())
        return total

    def losses(self, input_ids: Tensor) -> Tensor:
        """ids [B, T] -> negative log-likelihoods [B, T - 1], float32, of every token but the first of these."""
        return self.read(input_ids)[0]

    @torch.no_grad()
    def read(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Losses as `losses` has them, and the eviction times [B, L, T - 1] of the tokens that were read.

        The last token is not read: it predicts nothing, so that its attention is nobody's future.
        """
        ids = input_ids.to(self.model.device)
        with msrnn_attention(self.model):
            config = self.model.config.get_text_config(decoder=True)
            layers = [FutureLayer(config, self.future) for _ in range(config.num_hidden_layers)]
            logits = self.model(input_ids=ids[:, :-1], past_key_values=OwnedCache(layers=layers), use_cache=True).logits
        times = torch.stack([layer.evicted_at.to(ids.device) for layer in layers], 1)
        return compute_losses(logits, ids[:, 1:]), times

    def count_chunks(self, length: int) -> int:
        """Chunks of this length that are read together; refuses a length of which not even one fits."""
        embeddings: Any = self.model.get_input_embeddings()
        logits: int = length * int(embeddings.num_embeddings) * self.model.dtype.itemsize
        one = 4 * MATRICES * length**2 + logits
        device = self.model.device
        check_fits(one, device, f"the true future of {length:,} tokens", lambda _: "use a smaller length")
        free = available_bytes(device)
        most = BYTES.get(device.type, 2**28)
        return max(1, (most if free is None else min(most, free // 2)) // one)


def _check_model(model: PreTrainedModel) -> None:
    """Refuse a model with layers for which the true future is not defined."""
    spec = inspect_model(model)
    if spec.shards is not None:
        raise _refuse("is not defined for a model that several processes share")
    for what, has in (
        ("linear-attention layers", None in spec.layers),
        ("sliding windows", any(window is not None for window in spec.windows)),
    ):
        if has:
            raise _refuse(f"is not defined for {what}, which {type(model).__name__} has")


def _refuse(reason: str) -> UsageError:
    return UsageError(reason, name="policy", value="future", advice="leave out this row")
