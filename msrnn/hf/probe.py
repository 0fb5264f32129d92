"""Short forward passes that inspect a model's layers: shapes, causal order, and how they count positions.

They run with the attention of msrnn active, on cache layers that record what reaches them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionLayer

from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape
from msrnn.errors import UsageError
from msrnn.hf.attention import NAME
from msrnn.hf.cache_layers import OwnedLayer
from msrnn.hf.masks import NotCausalError, watched_windows
from msrnn.layer import plain_attention

TRIED = 48  # tokens that a hybrid model reads in the test of `check_split`
ROUNDING = {torch.float32: 5e-5, torch.float64: 1e-6}  # largest relative difference of logits read in parts
COARSE = 0.05  # the same in 16-bit dtypes


class Probed(NamedTuple):
    """What a probe recorded of one attention layer."""

    shape: LayerShape
    key: Tensor  # [rows, K, 1, D] of the first token
    module: nn.Module  # the attention module
    passes_use_cache: bool  # whether `use_cache` of the model's call reaches the attention function


def host_layers(config: Any) -> list[Any]:
    """The cache layers that transformers itself would use."""
    return list(DynamicCache(config=config).layers)


def some_tokens(model: PreTrainedModel, count: int) -> Tensor:
    """[1, count] ids from all over the vocabulary, without padding, which some models do not count in positions."""
    vocabulary: Any = model.get_input_embeddings().num_embeddings
    padding = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    ids = (torch.arange(count, device=model.device) * max(1, vocabulary // count) + 1) % vocabulary
    return torch.where(ids == padding, (ids + 1) % vocabulary, ids)[None] if padding is not None else ids[None]


class _Probe(OwnedLayer):
    """A cache layer that records what reaches it, and keeps nothing."""

    seen: Probed | None = None
    times = 0
    module: nn.Module
    passes_use_cache = False

    def check_call(self, module: nn.Module, use_cache: bool | None) -> None:
        self.module, self.passes_use_cache = module, use_cache is True

    def attend(self, query: Tensor, key: Tensor, value: Tensor, _: Tensor | None, scoring: Scoring) -> Tensor:
        shape = LayerShape(query.shape[1], key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device)
        self.seen, self.times = Probed(shape, key[:, :, :1], self.module, self.passes_use_cache), self.times + 1
        return plain_attention(query, key, value, None, scoring)[0]


@torch.no_grad()
def probe(
    model: PreTrainedModel, config: Any, rows: int = 1, position: int | None = None, columns: int = 0, length: int = 1
) -> list[Probed | None]:
    """Run `rows` sequences of `length` tokens through the model; the record of each layer, None for linear attention.

    All tokens get this `position`, if one is given, and the cache reports `columns` columns before them.
    """
    layers: list[Any] = [
        layer if isinstance(layer, LinearAttentionLayer) else _Probe(config) for layer in host_layers(config)
    ]
    for layer in layers:
        if isinstance(layer, _Probe):
            layer.columns = columns
    unreached = f"{type(model).__name__}: its attention does not use transformers' AttentionInterface"
    if config._attn_implementation != NAME:
        raise UsageError(f"{unreached}, so msrnn cannot bound it")
    tokens = some_tokens(model, rows).T.repeat(1, length)
    model(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        past_key_values=Cache(layers=layers),
        use_cache=True,
        **({} if position is None else {"position_ids": torch.full_like(tokens, position)}),
    )
    repeated = [i for i, layer in enumerate(layers) if isinstance(layer, _Probe) and layer.times > 1]
    if repeated:
        raise UsageError(f"{type(model).__name__} attends more than once to the states of layers {repeated}")
    missed = [i for i, layer in enumerate(layers) if isinstance(layer, _Probe) and layer.seen is None]
    if missed:
        raise UsageError(f"{unreached} in layers {missed}, so msrnn cannot bound it")
    return [layer.seen if isinstance(layer, _Probe) else None for layer in layers]


def inspect_layers(model: PreTrainedModel, config: Any) -> list[Probed | None]:
    """Inspect each layer; refuse a model that does not attend in causal order, or whose keys are NaN."""
    name = type(model).__name__
    try:
        with watched_windows() as masked:
            seen = probe(model, config, length=2)
    except NotCausalError as error:
        raise UsageError(
            f"{name} attends to later tokens (is_causal=False, use_bidirectional_attention=True or an encoder): "
            "msrnn bounds decoders, which read in causal order"
        ) from error
    except ValueError as error:
        if not str(error).startswith("attention mask of"):
            raise
        raise UsageError(f"{name} changes its attention mask in a way that msrnn does not support") from error
    windows = {getattr(layer, "sliding_window", None) for layer in host_layers(config)} - {None}
    if windows and not windows & set(masked):
        raise UsageError(
            f"{name} caches with a sliding window and masks without one: prefill would differ from decode steps"
        )
    broken = [i for i, layer in enumerate(seen) if layer and not bool(layer.key.isfinite().all())]
    if broken:
        reason = non_finite_weights(model) or "its weights are finite, so numbers overflow its dtype"
        raise UsageError(
            f"{name}: the keys of layer {broken[0]} are NaN or infinite; {reason}; load it again, or in float32"
        )
    return seen


@torch.no_grad()
def non_finite_weights(model: PreTrainedModel) -> str | None:
    """A short description of the weights that are NaN or infinite; None: all are finite."""
    named = [(name, weight) for name, weight in model.named_parameters() if weight.is_floating_point()]
    broken = [name for name, weight in named if not weight.is_meta and not bool(torch.isfinite(weight).all())]
    if not broken:
        return None
    return f"{len(broken)} of its {len(named)} weights have NaN or infinite numbers, {broken[0]} first"


def check_takes_positions(model: PreTrainedModel, config: Any, layers: Sequence[Probed | None]) -> None:
    """Refuse a model that cannot be read block by block: it must return logits and use the position ids it is given.

    Some models count positions by the cache, or from another number than 0. `layers` has the keys of position 0.
    """
    if not model.can_generate():
        raise UsageError(f"{type(model).__name__} returns no logits: load the model with AutoModelForCausalLM")
    for own, given in zip(layers, probe(model, config, position=0, columns=1), strict=True):
        if own and given and not torch.allclose(own.key, given.key, rtol=1e-2, atol=1e-2):
            raise UsageError(
                f"{type(model).__name__} ignores the position ids it is given: "
                "use MultiStateCache with the model's own generate"
            )


@torch.no_grad()
def check_split(model: PreTrainedModel, config: Any, in_blocks: bool) -> None:
    """Refuse a hybrid model whose linear-attention layers give other results when a text is read in parts.

    Some lose their state when more than one token follows (checked if msrnn reads `in_blocks`). Some use another
    formula in decode steps than in prefill.
    """
    tokens = some_tokens(model, TRIED)

    def logits(parts: list[Tensor]) -> Tensor:
        cache = DynamicCache(config=config)
        return torch.cat(
            [model(input_ids=part, use_cache=True, past_key_values=cache).logits for part in parts], dim=1
        ).float()

    expected = logits([tokens])
    first, second = tokens.chunk(2, dim=1)
    ways = {"in two parts": [first, second]} if in_blocks else {}
    for how, parts in (ways | {"token by token": [first, *second.split(1, dim=1)]}).items():
        difference = float((logits(parts) - expected).abs().max() / expected.abs().max())
        if not difference <= ROUNDING.get(model.dtype, COARSE):
            raise UsageError(
                f"{type(model).__name__}: read {how}, its logits differ by {difference:.2%} from those of one forward "
                "pass: transformers does not carry the states of its linear-attention layers over"
            )
