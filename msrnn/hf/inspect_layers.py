"""Short forward passes that inspect a model's layers: shapes, causal order, how they count positions, and their RoPE.

They run with the attention of msrnn active, on cache layers that record what reaches them. No model family is
recognised by its name: a layer's RoPE is the rotation that turns its key at position 0 into its keys at others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionLayer

from msrnn.core.rope import Rope
from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape
from msrnn.errors import UsageError
from msrnn.hf.attention import NAME, MaskError, NotCausalError, watch_windows
from msrnn.hf.cache_layers import OwnedLayer
from msrnn.hf.fingerprint import non_finite_weights
from msrnn.layer import plain_attention

TRIED = 48  # tokens that a hybrid model reads in the test of `check_split`
ROUNDING = {torch.float32: 5e-5, torch.float64: 1e-6}  # largest relative difference of logits read in parts
COARSE = 0.05  # the same in 16-bit dtypes
COMPARED = 8  # tokens whose keys are compared to find a RoPE: a single one may have an embedding of zeros
POSITIONS = (1, 100)  # positions that distinguish both fast and slow frequencies
CLOSE = 0.02  # relative: cosines in bfloat16 are good to 0.004, another rotation is off by 0.1 and more
_CHANGING = ("dynamic", "longrope")


class RecordedLayer(NamedTuple):
    """The inputs that reached one attention layer."""

    shape: LayerShape
    key: Tensor  # [B, K, 1, D] of the first token
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


class _RecordingLayer(OwnedLayer):
    """A cache layer that records what reaches it, and keeps nothing."""

    seen: RecordedLayer | None = None
    times = 0
    module: nn.Module
    passes_use_cache = False

    def __init__(self, config: Any, columns: int) -> None:
        super().__init__(config)
        self.columns = columns

    def get_seq_length(self) -> int:
        return self.columns

    def check_call(self, module: nn.Module, use_cache: bool | None) -> None:
        self.module, self.passes_use_cache = module, use_cache is True

    def attend(self, query: Tensor, key: Tensor, value: Tensor, _: Tensor | None, scoring: Scoring) -> Tensor:
        shape = LayerShape(query.shape[1], key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device)
        self.seen, self.times = RecordedLayer(shape, key[:, :, :1], self.module, self.passes_use_cache), self.times + 1
        return plain_attention(query, key, value, None, scoring)[0]


@torch.no_grad()
def record_layers(
    model: PreTrainedModel, config: Any, batch: int = 1, position: int | None = None, columns: int = 0, length: int = 1
) -> list[RecordedLayer | None]:
    """Run `batch` sequences of `length` tokens through the model; the record of each layer, None for linear attention.

    All tokens get this `position`, if one is given, and the cache reports `columns` columns before them.
    """
    layers: list[Any] = [
        layer if isinstance(layer, LinearAttentionLayer) else _RecordingLayer(config, columns)
        for layer in host_layers(config)
    ]
    unreached = f"{type(model).__name__}: its attention does not use transformers' AttentionInterface"
    if config._attn_implementation != NAME:
        raise UsageError(f"{unreached}, so msrnn cannot bound it")
    tokens = some_tokens(model, batch).T.repeat(1, length)
    model(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        past_key_values=Cache(layers=layers),
        use_cache=True,
        **({} if position is None else {"position_ids": torch.full_like(tokens, position)}),
    )
    repeated = [i for i, layer in enumerate(layers) if isinstance(layer, _RecordingLayer) and layer.times > 1]
    if repeated:
        raise UsageError(f"{type(model).__name__} attends more than once to the KV rows of layers {repeated}")
    missed = [i for i, layer in enumerate(layers) if isinstance(layer, _RecordingLayer) and layer.seen is None]
    if missed:
        raise UsageError(f"{unreached} in layers {missed}, so msrnn cannot bound it")
    return [layer.seen if isinstance(layer, _RecordingLayer) else None for layer in layers]


def inspect_layers(model: PreTrainedModel, config: Any) -> list[RecordedLayer | None]:
    """Inspect each layer; refuse a model that does not attend in causal order, or whose keys are NaN."""
    name = type(model).__name__
    try:
        with watch_windows() as masked:
            seen = record_layers(model, config, length=2)
    except NotCausalError as error:
        raise UsageError(
            f"{name} attends to later tokens (is_causal=False, use_bidirectional_attention=True or an encoder): "
            "msrnn bounds decoders, which read in causal order"
        ) from error
    except MaskError as error:
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


def check_takes_positions(model: PreTrainedModel, config: Any, layers: Sequence[RecordedLayer | None]) -> None:
    """Refuse a model that cannot be read block by block: it must return logits and use the position ids it is given.

    Some models count positions by the cache, or from another number than 0. `layers` has the keys of position 0.
    """
    if not model.can_generate():
        raise UsageError(f"{type(model).__name__} returns no logits: load the model with AutoModelForCausalLM")
    zero = record_layers(model, config, position=0, columns=1)
    pairs = [(own.key, given.key) for own, given in zip(layers, zero, strict=True) if own and given]
    if all(torch.allclose(own, given, rtol=1e-2, atol=1e-2) for own, given in pairs):
        return
    # In 16 bits, rounding may exceed any limit; but it is small against the effect of another position.
    one = record_layers(model, config, position=1, columns=1)
    if _distance(layers, zero) > _distance(one, zero) / 2:
        raise UsageError(
            f"{type(model).__name__} ignores the position ids it is given: "
            "use MultiStateCache with the model's own generate"
        )


def _distance(layers: Sequence[RecordedLayer | None], others: Sequence[RecordedLayer | None]) -> float:
    """How far keys are from others, relative to their norms, summed over layers."""
    pairs = [(a.key.float(), b.key.float()) for a, b in zip(layers, others, strict=True) if a and b]
    return sum(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)


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


def rotates(model: PreTrainedModel) -> bool:
    """Whether a model has rotary positions."""
    return bool(_frequencies(model))


def inspect_rope(model: PreTrainedModel, config: Any) -> list[Rope | None]:
    """The RoPE of each layer; None: a layer without positions. Refuses, with the reason, what cannot be re-rotated.

    A single token attends to itself at any position, so its keys in all layers differ by their rotation only.
    """
    name, frequencies = type(model).__name__, _frequencies(model)
    none = f"{name} has no rotary positions (RoPE) to re-rotate: use positions='original'"
    if not frequencies:
        raise UsageError(none)
    changing = sorted(kind for kind in _kinds(model) if any(known in kind for known in _CHANGING))
    if changing:
        raise UsageError(
            f"{name} has rotary positions of type {', '.join(changing)}, whose frequencies change with the length: "
            "keys cannot be re-rotated; use positions='original'"
        )
    seen = {position: record_layers(model, config, COMPARED, position) for position in (0, *POSITIONS)}
    ropes: list[Rope | None] = []
    for i in range(len(seen[0])):
        keys = {position: layer.key for position, layers in seen.items() if (layer := layers[i])}
        ropes.append(_rotation(keys, frequencies, f"{name}, layer {i}") if keys else None)
    if not any(ropes):
        raise UsageError(none)
    return ropes


def _frequencies(model: PreTrainedModel) -> list[Tensor]:
    """The frequencies of its rotary embeddings; a model may have several, for layers of several kinds."""
    buffers = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq") and "original" not in name]
    return [buffer.detach().float() for buffer in buffers if buffer.ndim == 1]


def _kinds(model: PreTrainedModel) -> set[str]:
    """The types of its rotary embeddings: one for each, or one for each kind of layer."""
    types = [getattr(module, "rope_type", None) for module in model.modules()]
    nested = [list(kind.values()) if isinstance(kind, dict) else [kind] for kind in types]
    return {kind for kinds in nested for kind in kinds if isinstance(kind, str)}


def _rotation(keys: dict[int, Tensor], frequencies: list[Tensor], layer: str) -> Rope | None:
    """The rotation that turns a layer's keys at position 0 [B, K, 1, D] into its keys at the others."""
    if all(torch.equal(keys[0], key) for key in keys.values()):
        return None
    candidates = list(_candidates(keys[0], frequencies))
    errors = [_error(rope, keys) for rope in candidates]
    if not min(errors, default=1.0) < CLOSE:
        raise UsageError(f"{layer} rotates its keys in an unknown way: use positions='original'")
    return candidates[errors.index(min(errors))]


def _candidates(key: Tensor, frequencies: list[Tensor]) -> Iterator[Rope]:
    for frequency in frequencies:
        spare = key.shape[-1] - 2 * len(frequency)
        if spare >= 0:
            for start in {0, spare}:
                for interleaved in (False, True):
                    yield Rope(frequency.to(key.device), start, interleaved)


def _error(rope: Rope, keys: dict[int, Tensor]) -> float:
    """The largest relative difference between keys rotated from position 0 and what the model wrote there."""
    start = torch.zeros(1, device=keys[0].device)
    errors = []
    for position, key in keys.items():
        rotated = rope.rotate(keys[0], rope.angle(start, start + position))
        errors.append(float((rotated - key.float()).norm() / key.float().norm()))
    return max(errors)
