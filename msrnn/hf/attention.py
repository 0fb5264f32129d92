"""The attention and mask functions that transformers calls by name.

A cache layer of msrnn attaches itself to the new keys (`keys.owner`). The attention function finds it there and calls
it to append, attend, observe and evict. Nothing is patched or hooked; models that do not use the name are not affected.

A bounded layer attends to what it holds, so a mask may only mark padding. Causal masks, with or without a sliding
window, show which columns are padding. Any other mask (bidirectional image tokens, packed sequences, holes) cannot be
honoured and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from msrnn.core.scores import Scoring
from msrnn.errors import UsageError
from msrnn.hf.cache_layers import NAME as NAME
from msrnn.hf.cache_layers import OwnedLayer
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
    _check_inference(query.requires_grad or key.requires_grad, dropout, output_attentions)
    owner.check_call(module, use_cache)
    real = owner.real if owner.real is not None else real_columns(attention_mask, query.shape[2], owner.window)
    if query.shape[2] > 1 and owner.get_seq_length() > 0 and position_ids is not None:
        owner.check_goes_on(position_ids, real)
    if real is not None and owner.real is None:
        owner.check_ends(real, attention_mask)
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


_windows: ContextVar[list[int | None] | None] = ContextVar("windows", default=None)


class MaskError(UsageError):
    """An attention mask in a form that no state can follow."""


class NotCausalError(UsageError):
    """A mask that contains more than causal order, a layer's own window and padding."""


@contextmanager
def watch_windows() -> Iterator[list[int | None]]:
    """Collect the sliding windows of the masks that are built inside this context; None for a mask without one."""
    built: list[int | None] = []
    token = _windows.set(built)
    try:
        yield built
    finally:
        _windows.reset(token)


def build_mask(
    mask_function: Callable[..., Any] = causal_mask_function,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """transformers' mask interface: [B, 1, T, N], True where a query sees a key; None for a plain causal mask.

    A bidirectional mask is always built: None would be read as causal.
    """
    built: Tensor | None = sdpa_mask(
        mask_function=mask_function, allow_is_causal_skip=allow_is_causal_skip, local_size=local_size, **kwargs
    )
    watching = _windows.get()
    if watching is not None:
        watching.append(local_size)
    if built is not None:
        # transformers clears `allow_is_causal_skip` wherever it adds anything to a causal mask.
        built.known_causal = allow_is_causal_skip or mask_function is causal_mask_function  # type: ignore[attr-defined]
    return built


def real_columns(mask: Tensor | None, columns: int, window: int | None) -> Tensor | None:
    """Which columns are tokens, [B, T], from a mask [B, 1, T, T]: a token sees itself, padding does not.

    `window` is the layer's sliding window. Raises if the mask contains more than causal order, that window and padding.
    """
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        raise MaskError(f"attention mask of {mask.dtype}: pass a 2-D mask of ones and zeros (1 for a token)")
    if mask.ndim != 4 or mask.shape[2:] != (columns, columns):
        raise MaskError(
            f"attention mask of shape {list(mask.shape)}: must cover the {columns} new columns alone, as "
            f"[batch, 1, {columns}, {columns}]; pass a 2-D mask instead"
        )
    real = mask[:, 0].diagonal(dim1=-2, dim2=-1)
    if not getattr(mask, "known_causal", False):
        # One mask serves many layers: it is checked again only when it has changed.
        version = (None if mask.is_inference() else mask._version, window)
        if version[0] is None or getattr(mask, "checked_version", None) != version:
            _check_causal(mask, real, window)
            mask.checked_version = version  # type: ignore[attr-defined]
    return real


def _check_causal(mask: Tensor, real: Tensor, window: int | None) -> None:
    columns = torch.arange(mask.shape[-1], device=mask.device)
    distance = columns[:, None] - columns
    expected = real[:, None, None] & (distance >= 0)
    if window is not None:
        expected = expected & (distance < window)
    wrong = (mask != expected) & real[:, None, :, None]  # what padding would see does not matter
    if bool(wrong.any()):
        sequence, _, query, key = wrong.nonzero()[0].tolist()
        what = "sees" if key > query else "does not see"
        raise NotCausalError(
            f"attention mask: in sequence {sequence}, column {query} {what} column {key}. A bounded state reads in "
            "causal order, with padding at most: masks for images, prefixes, packed sequences or holes are not "
            "supported"
        )


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, build_mask)
