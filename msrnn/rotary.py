"""The model's own rotation, learned from the model: its frequencies, and how they turn what one token writes.

Nothing is read off a family's name: a layer's rotation is the one that makes its key at position 0 its key at others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.positions import Rotary

ROWS = 8  # tokens that are looked at: one alone may have an embedding of zeros
PROBED = (1, 100)  # positions that tell both fast and slow frequencies apart
CLOSE = 0.02  # relative: cosines in bfloat16 are good to 0.004, another rotation is off by 0.1 and more
_CHANGING = ("dynamic", "longrope")

Keys = list[Tensor | None]  # of each layer: [rows, K, 1, D]; None: a linear-attention layer


def learn(model: PreTrainedModel, keys_at: Callable[[int, int], Keys]) -> list[Rotary | None]:
    """Each layer's rotation; None: a layer without positions. Refuses, with the reason, what cannot be turned.

    `keys_at(rows, position)` tells the keys of so many tokens, each alone at that position. A token alone attends to
    itself wherever it stands, so its keys in all layers differ by their rotation only.
    """
    name, frequencies = type(model).__name__, _frequencies(model)
    none = f"{name} has no rotary positions that could be moved: use positions='original'"
    if not frequencies:
        raise ValueError(none)
    changing = sorted(kind for kind in _kinds(model) if any(known in kind for known in _CHANGING))
    if changing:
        raise ValueError(
            f"{name} has rotary positions of type {', '.join(changing)}, whose frequencies change with the length: "
            "a key does not tell by which it was rotated; use positions='original'"
        )
    start, others = keys_at(ROWS, 0), [keys_at(ROWS, position) for position in PROBED]
    found = [
        None if key is None else _rotation(key, [keys[i] for keys in others], frequencies, f"{name}, layer {i}")
        for i, key in enumerate(start)
    ]
    if not any(found):
        raise ValueError(none)
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


def _rotation(key: Tensor, others: Sequence[Tensor | None], frequencies: list[Tensor], layer: str) -> Rotary | None:
    pairs = [(position, other) for position, other in zip(PROBED, others, strict=True) if other is not None]
    if all(torch.equal(key, other) for _, other in pairs):
        return None
    best = min(
        _candidates(key, frequencies),
        key=lambda rotary: max(_error(rotary, key, position, other) for position, other in pairs),
        default=None,
    )
    if best is None or not all(_error(best, key, position, other) < CLOSE for position, other in pairs):
        raise ValueError(f"{layer} moves its keys by more than a rotation that is known: use positions='original'")
    return best


def _candidates(key: Tensor, frequencies: list[Tensor]) -> Iterator[Rotary]:
    for frequency in frequencies:
        spare = key.shape[-1] - 2 * len(frequency)
        if spare >= 0:
            for start in {0, spare}:
                for interleaved in (False, True):
                    yield Rotary(frequency.to(key.device), start, interleaved)


def _error(rotary: Rotary, key: Tensor, position: int, other: Tensor) -> float:
    """How far the key, turned from 0 to a position, is from what the model writes there; relative."""
    start, place = (torch.tensor([n], device=key.device) for n in (0, position))
    return float((rotary.turned(key, rotary.angle(start, place)) - other.float()).norm() / other.float().norm())
