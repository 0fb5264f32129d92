"""The model's own rotation, learned from the model: its frequencies, and how they turn what one token writes.

Nothing is read off a family's name: a layer's rotation is the one that makes its key at position 0 its key at others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.core.rope import Rope
from msrnn.errors import UsageError
from msrnn.hf.inspect import probe

ROWS = 8  # tokens that are looked at: one alone may have an embedding of zeros
PROBED = (1, 100)  # positions that tell both fast and slow frequencies apart
CLOSE = 0.02  # relative: cosines in bfloat16 are good to 0.004, another rotation is off by 0.1 and more
_CHANGING = ("dynamic", "longrope")


def learn(model: PreTrainedModel, config: Any) -> list[Rope | None]:
    """Each layer's rotation; None: a layer without positions. Refuses, with the reason, what cannot be turned.

    A token alone attends to itself wherever it new_position, so its keys in all layers differ by their rotation only.
    """
    name, frequencies = type(model).__name__, _frequencies(model)
    none = f"{name} has no rotary positions that could be moved: use positions='original'"
    if not frequencies:
        raise UsageError(none)
    changing = sorted(kind for kind in _kinds(model) if any(known in kind for known in _CHANGING))
    if changing:
        raise UsageError(
            f"{name} has rotary positions of type {', '.join(changing)}, whose frequencies change with the length: "
            "a key does not tell by which it was rotated; use positions='original'"
        )
    seen = {position: probe(model, config, ROWS, position) for position in (0, *PROBED)}
    found: list[Rope | None] = []
    for i in range(len(seen[0])):
        keys = {position: layer.key for position, layers in seen.items() if (layer := layers[i])}
        found.append(_rotation(keys, frequencies, f"{name}, layer {i}") if keys else None)
    if not any(found):
        raise UsageError(none)
    return found


def _frequencies(model: PreTrainedModel) -> list[Tensor]:
    """Those of its rotary embeddings, as they are now: a model may have several, for layers of several kinds."""
    found = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq") and "original" not in name]
    return [buffer.detach().float() for buffer in found if buffer.ndim == 1]


def _kinds(model: PreTrainedModel) -> set[str]:
    """The types of its rotary embeddings: one for each, or one for each kind of layer."""
    found = [getattr(module, "rope_type", None) for module in model.modules()]
    nested = [list(kind.values()) if isinstance(kind, dict) else [kind] for kind in found]
    return {kind for kinds in nested for kind in kinds if isinstance(kind, str)}


def _rotation(keys: dict[int, Tensor], frequencies: list[Tensor], layer: str) -> Rope | None:
    """The one that makes a layer's keys at position 0 [rows, K, 1, D] its keys at the others."""
    if all(torch.equal(keys[0], key) for key in keys.values()):
        return None
    candidates = list(_candidates(keys[0], frequencies))
    errors = [_error(rope, keys) for rope in candidates]
    if not min(errors, default=1.0) < CLOSE:
        raise UsageError(f"{layer} moves its keys by more than a rotation that is known: use positions='original'")
    return candidates[errors.index(min(errors))]


def _candidates(key: Tensor, frequencies: list[Tensor]) -> Iterator[Rope]:
    for frequency in frequencies:
        spare = key.shape[-1] - 2 * len(frequency)
        if spare >= 0:
            for start in {0, spare}:
                for interleaved in (False, True):
                    yield Rope(frequency.to(key.device), start, interleaved)


def _error(rope: Rope, keys: dict[int, Tensor]) -> float:
    """How far keys that are turned from 0 to a position are from what the model writes there, at most; relative."""
    start = torch.zeros(1, device=keys[0].device)
    errors = []
    for position, key in keys.items():
        turned = rope.rotate(keys[0], rope.angle(start, start + position))
        errors.append(float((turned - key.float()).norm() / key.float().norm()))
    return max(errors)
