"""Files of learned row weights: safetensors with the networks of all layers, for one model.

The tensors of layer i are `i.mean`, `i.scale`, `i.hidden`, …: the fields of a `WeightNetwork`, all float32. Metadata
has the format, the number of layers, the fingerprint and the name of the model, and how the networks were trained.
Nothing in a file is trusted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor

from msrnn.core.atomic import write_atomically
from msrnn.core.weight_network import PARAMETERS, WeightNetwork
from msrnn.errors import FileError, UsageError

FORMAT = "msrnn row weights 1"
_KEY, _TRAINING = "msrnn_weights", "training"
MOST_BYTES = 2**30
WIDEST = 256  # hidden numbers of a network
LARGEST = 1e4  # no parameter is farther from 0: then no sum of them overflows
LEAST_SCALE = 1e-6
ALPHAS = (0.05, 20.0)
_OTHER = "use a file that was made for this model, or a policy without a file"


class HeadShape(NamedTuple):
    """The KV heads of one layer, in all processes, and their dimensions."""

    kv_heads: int
    key_dim: int
    value_dim: int


class WeightsFile(NamedTuple):
    """The content of a file."""

    networks: list[WeightNetwork | None]  # of each layer; None: it has no KV rows
    digest: str  # SHA-256 of all bytes, which identifies the weights


def save_weights(
    path: str | os.PathLike[str],
    networks: Sequence[WeightNetwork | None],
    model: str,
    architecture: str,
    training: Mapping[str, Any] | None = None,
) -> None:
    """Write the networks of all layers of a model, which its fingerprint identifies and `architecture` names.

    `training` is written for readers of the file: how the networks were made. Nothing is decided by it.
    """
    tensors = {
        f"{i}.{name}": tensor.detach().cpu().contiguous()
        for i, network in enumerate(networks)
        if network is not None
        for name, tensor in network.tensors().items()
    }
    about: dict[str, Any] = {"format": FORMAT, "model": model, "architecture": architecture, "layers": len(networks)}
    about |= {} if training is None else {_TRAINING: training}
    content = save(tensors, {_KEY: json.dumps(about, sort_keys=True)})  # several entries would have no fixed order
    write_atomically(Path(path), lambda to: _write(to, content))


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def load_weights(
    path: str | os.PathLike[str], shapes: Sequence[HeadShape | None], model: str, architecture: str
) -> WeightsFile:
    """Read the weights of a model that has layers of these shapes. Refuses every file that is not one of its own."""
    content = _read(Path(path))
    try:
        tensors, about = _parse(content)
        if (found := about["model"]) != model:
            raise UsageError(f"made for other weights, those of {about['architecture']} ({found:.40})", advice=_OTHER)
        return WeightsFile(_make_networks(tensors, about["layers"], shapes), hashlib.sha256(content).hexdigest())
    except UsageError as error:
        raise FileError(f"{error.message}: this model is {architecture}", path, advice=error.advice) from error


def read_training(path: str | os.PathLike[str]) -> dict[str, Any]:
    """How the networks of a file were made, as it says itself; empty if it does not."""
    try:
        training: dict[str, Any] = _parse(_read(Path(path)))[1].get(_TRAINING, {})
    except UsageError as error:
        raise FileError(error.message, path, advice=error.advice) from error
    return training


def _read(path: Path) -> bytes:
    try:
        if not path.is_file():
            what = "not a regular file" if path.exists() else "no such file"
            raise FileError(what, path, advice="name a file of row weights, as in echo@weights.safetensors")
        if path.stat().st_size > MOST_BYTES:
            raise FileError(f"larger than {MOST_BYTES:,} bytes, so not a file of row weights", path, advice=_OTHER)
        return path.read_bytes()
    except OSError as error:
        raise FileError(
            f"cannot be read ({error.strerror})", path, advice="make it readable, or use another"
        ) from error


def _parse(content: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors, and the description."""
    try:
        tensors = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        about = json.loads(header["__metadata__"][_KEY])
    except Exception as error:  # each version of safetensors refuses in its own way
        raise UsageError(f"damaged, or not a file of row weights ({error!r:.100})", advice=_OTHER) from error
    kinds = {"format": str, "model": str, "architecture": str, "layers": int}
    if not isinstance(about, dict) or about.keys() - {_TRAINING} != kinds.keys():
        raise UsageError("its description has other fields than a file of row weights", advice=_OTHER)
    for name, kind in kinds.items():
        if type(about[name]) is not kind:
            raise UsageError(f"its {name} is {about[name]!r:.40}", advice=_OTHER)
    if not isinstance(about.get(_TRAINING, {}), dict):
        raise UsageError(f"its training is {about[_TRAINING]!r:.40}", advice=_OTHER)
    if about["format"] != FORMAT:
        advice = "install the msrnn that wrote it, or make it again with this one"
        raise UsageError(f"its format is {about['format']!r:.40}, not {FORMAT!r}", advice=advice)
    return tensors, about


def _make_networks(
    tensors: Mapping[str, Tensor], layers: int, shapes: Sequence[HeadShape | None]
) -> list[WeightNetwork | None]:
    if layers != len(shapes):
        raise UsageError(f"made for {layers} layers, not {len(shapes)}", advice=_OTHER)
    expected = {f"{i}.{name}" for i, shape in enumerate(shapes) if shape for name in PARAMETERS}
    if expected != tensors.keys():
        odd = min(expected ^ tensors.keys())
        problem = "is missing" if odd in expected else "belongs to no layer"
        raise UsageError(f"tensor {odd!r:.60} {problem}", advice=_OTHER)
    networks: list[WeightNetwork | None] = []
    for i, shape in enumerate(shapes):
        own: dict[str, Any] = {name: tensors[f"{i}.{name}"] for name in PARAMETERS} if shape else {}
        if shape:
            _check_tensors(i, own, shape)
        networks.append(WeightNetwork(**own) if shape else None)
    return networks


def _check_tensors(layer: int, tensors: Mapping[str, Tensor], shape: HeadShape) -> None:
    heads, inputs = shape.kv_heads, shape.key_dim + shape.value_dim
    width = tensors["hidden"].shape[1] if tensors["hidden"].ndim == 3 else 0
    if not 1 <= width <= WIDEST:
        raise UsageError(f"layer {layer}: networks of {width} hidden numbers, not 1 to {WIDEST}", advice=_OTHER)
    shapes = {
        **{"mean": [heads, inputs], "scale": [heads, inputs], "hidden": [heads, width, inputs]},
        **{"hidden_bias": [heads, width], "output": [heads, width], "output_bias": [heads], "alpha": []},
    }
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or list(tensor.shape) != shapes[name]:
            kind = f"{tensor.dtype} {list(tensor.shape)}, not torch.float32 {shapes[name]}"
            raise UsageError(f"layer {layer}: {name} is {kind:.120}", advice=_OTHER)
        if not bool((tensor.abs() <= LARGEST).all()):  # also False for NaN
            raise UsageError(f"layer {layer}: {name} has numbers beyond {LARGEST:g}, or not numbers", advice=_OTHER)
    if not bool((tensors["scale"] >= LEAST_SCALE).all()):
        raise UsageError(f"layer {layer}: scale has numbers below {LEAST_SCALE:g}", advice=_OTHER)
    alpha = float(tensors["alpha"])
    if not ALPHAS[0] <= alpha <= ALPHAS[1]:
        raise UsageError(f"layer {layer}: alpha is {alpha:g}, not {ALPHAS[0]:g} to {ALPHAS[1]:g}", advice=_OTHER)
