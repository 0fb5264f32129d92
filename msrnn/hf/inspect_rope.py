"""Find the RoPE of each layer from its keys: its frequencies, and which dimensions they rotate.

No model family is recognised by its name. A layer's rotation is the one that turns its key at position 0 into its keys
at other positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.core.rope import Rope
from msrnn.errors import UsageError
from msrnn.hf.probe import probe

ROWS = 8  # tokens that are compared: a single one may have an embedding of zeros
PROBED = (1, 100)  # positions that distinguish both fast and slow frequencies
CLOSE = 0.02  # relative: cosines in bfloat16 are good to 0.004, another rotation is off by 0.1 and more
_CHANGING = ("dynamic", "longrope")


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
    seen = {position: probe(model, config, ROWS, position) for position in (0, *PROBED)}
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
    """The rotation that turns a layer's keys at position 0 [rows, K, 1, D] into its keys at the others."""
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
