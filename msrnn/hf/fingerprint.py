"""Fingerprints: a model is identified by samples of its weights, quantized ones included."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from msrnn.core.device_memory import is_out_of_memory
from msrnn.hf.tensor_parallel import own_weight, whole_weight

_SAMPLES = 16  # of each weight


def fingerprint_of(model: PreTrainedModel, rounded: bool = False) -> str:
    """Identifies a model by its weights: names, shapes and 16 values of each, as they are when the model is wrapped.

    It does not notice a change of other values than the sampled ones, training after wrapping, or adapters that are
    switched off. A quantized weight counts by its codes and scales, or by what it dequantizes to. Weights on the meta
    device (offloaded to disk) count by shape. So does a weight that refuses all of this, with a warning.

    `rounded`: to bfloat16, so that a model has the same fingerprint in float32 and in bfloat16.
    """
    parts: list[bytes] = []
    samples: dict[torch.device, list[tuple[int, Tensor]]] = {}  # of each device, by their index in `parts`
    closed: list[str] = []
    for name, weight in _iterate_weights(model):
        if not isinstance(weight, Tensor):
            parts.append(f"{name}{type(weight).__name__}".encode())
            continue
        parts.append(f"{name}{list(weight.shape)}".encode())
        if weight.device.type == "meta":
            continue
        found = _sample(weight.detach())
        if not found:
            parts[-1] += type(weight).__name__.encode()
            closed.append(name)
        for sample in found:
            samples.setdefault(sample.device, []).append((len(parts) - 1, sample))
    for of_device in samples.values():
        numbers = torch.cat([sample for _, sample in of_device]).cpu()
        numbers = numbers.bfloat16().float() if rounded else numbers
        own = numbers.split([len(sample) for _, sample in of_device])
        for (i, _), sample in zip(of_device, own, strict=True):
            parts[i] += sample.numpy().tobytes()
    if closed:
        warnings.warn(
            f"{len(closed)} weights of this {type(model).__name__} cannot be sampled, {closed[0]} first: states of a "
            "model that differs in these alone are not refused; keep the states of each model apart",
            stacklevel=2,
        )
    return digest_of(b"".join(parts))


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _iterate_weights(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """The entries of the state dict, those of packed weights (tuples of tensors) one by one."""
    for name, weight in model.state_dict().items():
        if isinstance(weight, tuple | list):
            yield from ((f"{name}.{i}", part) for i, part in enumerate(weight))
        else:
            yield name, weight


def _sample(weight: Tensor) -> list[Tensor]:
    """Some values of a weight, as float32; none if it refuses to be looked into, as quantized tensors may."""
    ways: list[Callable[[Tensor], list[Tensor]]] = [_of_values]
    if not isinstance(weight, DTensor):  # processes that share a model must all look into it in the same way
        ways += [_of_inner_tensors, _of_dequantized]
    for sample in ways:
        try:
            found = [_ordinary(one) for one in sample(weight)]
        except Exception as error:  # each kind of tensor refuses in its own way
            if is_out_of_memory(error):
                raise
            continue
        if found:
            return found
    return []


def _ordinary(sample: Tensor) -> Tensor:
    """The numbers of a sample; raises if there are none, as in a wrapper of other tensors."""
    return sample if type(sample) is Tensor else torch.from_numpy(sample.cpu().numpy())


def _of_values(weight: Tensor) -> list[Tensor]:
    flat = whole_weight(weight).flatten()
    flat = flat.dequantize() if flat.is_quantized else flat
    return [flat[:: max(1, flat.numel() // _SAMPLES)].float()]


def _of_inner_tensors(weight: Tensor) -> list[Tensor]:
    return [sample for inner in inner_tensors(weight) for sample in _of_values(inner)]


def _of_dequantized(weight: Tensor) -> list[Tensor]:
    return _of_values(weight.dequantize())


def inner_tensors(weight: Any) -> list[Tensor]:
    """The ordinary tensors that a tensor subclass consists of, as codes and scales; itself if it is ordinary."""
    if not hasattr(weight, "__tensor_flatten__"):
        return [weight]
    names, _ = weight.__tensor_flatten__()
    parts = (getattr(weight, name) for name in names)
    return [inner for part in parts if isinstance(part, Tensor) for inner in inner_tensors(part)]


def addresses_of(weight: Tensor) -> list[int]:
    """Where the ordinary tensors of a weight are in memory."""
    return [_address(part) for part in inner_tensors(weight)]


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr() or (0 if tensor.is_meta else id(tensor))
    except RuntimeError:  # a tensor subclass without memory of its own
        return id(tensor)


@torch.no_grad()
def non_finite_weights(model: PreTrainedModel) -> str | None:
    """A short description of the weights that are NaN or infinite; None: all are finite."""
    named = [(name, own_weight(weight)) for name, weight in model.named_parameters() if weight.is_floating_point()]
    broken = [name for name, weight in named if not weight.is_meta and not _is_finite(weight)]
    if not broken:
        return None
    return f"{len(broken)} of its {len(named)} weights have NaN or infinite numbers, {broken[0]} first"


def _is_finite(weight: Tensor) -> bool:
    """Whether all numbers of a weight are finite, or the scales of a quantized one; True where that cannot be known."""
    try:
        return all(bool(torch.isfinite(part).all()) for part in inner_tensors(weight) if part.is_floating_point())
    except NotImplementedError:
        return True
