"""What a model's layers are made of, as the model itself shows it when a token passes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionLayer

from msrnn.attention import plain_attention
from msrnn.huggingface import NAME, OwnedLayer
from msrnn.scoring import Scoring
from msrnn.state import LayerShape


class Probed(NamedTuple):
    shape: LayerShape
    key: Tensor  # [rows, K, 1, D]


def host_layers(config: Any) -> list[Any]:
    """The layers that transformers itself would cache with."""
    return list(DynamicCache(config=config).layers)


class _Probe(OwnedLayer):
    """Remembers the token that passed."""

    seen: Probed | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, _: Tensor | None, scoring: Scoring) -> Tensor:
        shape = LayerShape(query.shape[1], key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device)
        self.seen = Probed(shape, key)
        return plain_attention(query, key, value, None, scoring)


@torch.no_grad()
def probe(model: PreTrainedModel, config: Any, rows: int = 1, position: int = 0) -> list[Probed | None]:
    """What each layer sees of so many tokens, each alone in its row and at this position; None: linear attention."""
    layers: list[Any] = [
        layer if isinstance(layer, LinearAttentionLayer) else _Probe(config) for layer in host_layers(config)
    ]
    unreached = f"{type(model).__name__}: its attention does not pass through transformers' AttentionInterface"
    if config._attn_implementation != NAME:
        raise ValueError(f"{unreached}, so msrnn cannot bound it")
    vocabulary: Any = model.get_input_embeddings().num_embeddings
    tokens = vocabulary // rows * torch.arange(rows, device=model.device)[:, None]
    model(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        past_key_values=Cache(layers=layers),
        use_cache=True,
        **({"position_ids": torch.full_like(tokens, position)} if position else {}),
    )
    missed = [i for i, layer in enumerate(layers) if isinstance(layer, _Probe) and layer.seen is None]
    if missed:
        raise ValueError(f"{unreached} in layers {missed}, so msrnn cannot bound it")
    return [layer.seen if isinstance(layer, _Probe) else None for layer in layers]
