"""The attention function that transformers calls by name, and the registration of it and of its masks.

A cache layer of msrnn attaches itself to the new keys (`keys.owner`). The attention function finds it there and calls
it to append, attend, observe and evict. Nothing is patched or hooked; models that do not use the name are not affected.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from msrnn.core.scores import Scoring
from msrnn.errors import UsageError
from msrnn.hf.cache_layers import NAME as NAME
from msrnn.hf.cache_layers import OwnedLayer
from msrnn.hf.masks import build_mask, real_columns
from msrnn.layer import plain_attention


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    use_cache: bool | None = None,
    output_attentions: bool | None = None,
    position_ids: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention interface: query [B, H, T, D], key and value [B, K, T, D] -> [B, T, H, D].

    torch.compile skips this function and compiles the rest of the layer: its kernels gain nothing from compilation, and
    every new column count would compile again.
    """
    scoring = Scoring(scaling if scaling is not None else query.shape[-1] ** -0.5, softcap, s_aux)
    owner: OwnedLayer | None = getattr(key, "owner", None)
    if position_bias is not None:
        raise UsageError(f"{type(module).__name__} adds a position bias to its scores, which msrnn does not support")
    if owner is None:
        if attention_mask is None and not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            attention_mask = query.new_ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool)  # an image encoder
        output, weights = plain_attention(
            query, key, value, attention_mask, scoring, dropout, weights=bool(output_attentions)
        )
        return output.contiguous(), weights
    owner.waiting = False
    try:
        _check_inference(query.requires_grad or key.requires_grad, dropout, output_attentions)
        owner.check_call(module, use_cache)
        real = owner.real if owner.real is not None else real_columns(attention_mask, query.shape[2], owner.window)
        if 1 < query.shape[2] < owner.columns and position_ids is not None:
            owner.check_goes_on(position_ids, real)
    except ValueError:
        owner.columns -= query.shape[2]  # nothing was read
        raise
    return owner.attend(query, key, value, real, scoring).contiguous(), None


def _check_inference(requires_grad: bool, dropout: float, output_attentions: bool | None) -> None:
    """Refuse training and attention weights, which a state that evicts cannot give."""
    if torch.is_grad_enabled() and requires_grad:
        raise UsageError("bounded states carry no gradient: call the model under torch.no_grad()")
    if dropout:
        raise UsageError("a bounded state is for inference: call model.eval() first")
    if output_attentions:
        raise UsageError(
            "output_attentions=True: attention over a bounded state has no fixed columns; msrnn.trace gives the "
            "eviction times, and attn_implementation='eager' without a bounded cache gives all weights"
        )


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, build_mask)
