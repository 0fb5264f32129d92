"""Files of row weights: what is read is what was written, and what no training can have written is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from msrnn.core.quantization import Rows
from msrnn.core.weights_file import FORMAT, HeadShape, load_weights, read_training, save_weights
from msrnn.errors import FileError
from tests.helpers.networks import random_network

SHAPES = [HeadShape(2, 4, 3), None, HeadShape(1, 2, 2)]
MODEL, NAME = "0123456789abcdef", "a Llama of 3 layers"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "weights.safetensors"
    save_weights(made, [shape and random_network(shape, i, 3) for i, shape in enumerate(SHAPES)], MODEL, NAME)
    return made


def test_what_is_read_is_what_was_written(path: Path, tmp_path: Path) -> None:
    networks, digest = load_weights(path, SHAPES, MODEL, NAME)
    for i, (found, shape) in enumerate(zip(networks, SHAPES, strict=True)):
        if shape is None or found is None:
            assert shape is found
            continue
        expected = random_network(shape, i, 3)
        assert all(torch.equal(tensor, found.tensors()[name]) for name, tensor in expected.tensors().items())
    again = tmp_path / "again.safetensors"
    save_weights(again, networks, MODEL, NAME)
    assert load_weights(again, SHAPES, MODEL, NAME).digest == digest, "the content identifies a file, not its name"
    save_weights(again, [shape and random_network(shape, 9, 3) for shape in SHAPES], MODEL, NAME)
    assert load_weights(again, SHAPES, MODEL, NAME).digest != digest


def test_a_file_says_how_it_was_trained(path: Path, tmp_path: Path) -> None:
    """Nothing is decided by it; the same content gives the same file."""
    assert read_training(path) == {}
    contents, training = set(), {"steps": 5, "texts": ["a", "b"]}
    for name in ("one", "other"):
        save_weights(tmp_path / name, load_weights(path, SHAPES, MODEL, NAME).networks, MODEL, NAME, training)
        contents.add((tmp_path / name).read_bytes())
    assert len(contents) == 1
    assert read_training(tmp_path / "one") == training
    assert load_weights(tmp_path / "one", SHAPES, MODEL, NAME).networks[0] is not None
    path.write_bytes(b"nothing")
    with pytest.raises(FileError, match="not a file of row weights"):
        read_training(path)


@pytest.mark.parametrize(
    ("shapes", "model", "message"),
    [
        (SHAPES, "another", "made for other weights, those of a Llama of 3 layers"),
        (SHAPES[:2], MODEL, "made for 3 layers, not 2"),
        ([HeadShape(2, 4, 3), HeadShape(2, 4, 3), HeadShape(1, 2, 2)], MODEL, "tensor '1.alpha' is missing"),
        ([HeadShape(2, 4, 3), None, None], MODEL, "tensor '2.alpha' belongs to no layer"),
        ([HeadShape(4, 4, 3), None, HeadShape(1, 2, 2)], MODEL, r"layer 0: mean is .*\[2, 7\], not .*\[4, 7\]"),
        ([HeadShape(2, 4, 3), None, HeadShape(1, 2, 4)], MODEL, "layer 2: mean is"),
    ],
)
def test_another_model_is_refused(path: Path, shapes: list[HeadShape | None], model: str, message: str) -> None:
    with pytest.raises(FileError, match=message) as caught:
        load_weights(path, shapes, model, "this one")
    assert str(caught.value).startswith(str(path))
    assert "this model is this one" in str(caught.value)
    assert caught.value.advice


EDITS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "nan": (lambda t: t["0.hidden"][0, 0].fill_(torch.nan), "layer 0: hidden has numbers beyond 10000, or not numbers"),
    "infinite": (lambda t: t["2.output"].fill_(torch.inf), "layer 2: output has numbers beyond"),
    "huge": (lambda t: t["0.mean"].fill_(1e20), "layer 0: mean has numbers beyond"),
    "scale 0": (lambda t: t["0.scale"].fill_(0), "scale has numbers below 1e-06"),
    "negative scale": (lambda t: t["0.scale"].fill_(-1), "scale has numbers below 1e-06"),
    "alpha 0": (lambda t: t["0.alpha"].fill_(0), "alpha is 0, not 0.05 to 20"),
    "negative alpha": (lambda t: t["0.alpha"].fill_(-1), "alpha is -1, not 0.05 to 20"),
    "dtype": (lambda t: t.update({"0.mean": t["0.mean"].half()}), "mean is torch.float16"),
    "shape": (lambda t: t.update({"0.output": t["0.output"][:1]}), r"output is torch.float32 \[1, 3\], not"),
    "missing": (lambda t: t.pop("2.scale"), "tensor '2.scale' is missing"),
    "unknown": (lambda t: t.update({"0.extra": torch.ones(1)}), "tensor '0.extra' belongs to no layer"),
    "no width": (lambda t: t.update({"0.hidden": torch.ones(2, 0, 7)}), "networks of 0 hidden numbers, not 1 to 256"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_what_no_training_writes_is_refused(path: Path, edit: str) -> None:
    tensors, (change, message) = load_file(path), EDITS[edit]
    change(tensors)
    about = {"format": FORMAT, "model": MODEL, "architecture": NAME, "layers": 3}
    save_file(tensors, path, {"msrnn_weights": json.dumps(about)})
    with pytest.raises(FileError, match=message):
        load_weights(path, SHAPES, MODEL, NAME)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        (
            {"format": "msrnn row weights 2"},
            "its format is 'msrnn row weights 2', not .*; install the msrnn",
        ),
        ({"layers": True}, "its layers is True"),
        ({"model": 5}, "its model is 5"),
        ({"more": 1}, "other fields"),
        ({"training": [1]}, "its training is"),
        (None, "not a file of row weights"),
    ],
)
def test_another_description_is_refused(path: Path, about: dict[str, Any] | None, message: str) -> None:
    given = {"format": FORMAT, "model": MODEL, "architecture": NAME, "layers": 3}
    metadata = None if about is None else {"msrnn_weights": json.dumps({**given, **about})}
    save_file(load_file(path), path, metadata)
    with pytest.raises(FileError, match=message):
        load_weights(path, SHAPES, MODEL, NAME)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such file; name a file of row weights"):
        load_weights(tmp_path / "none.safetensors", SHAPES, MODEL, NAME)
    with pytest.raises(FileError, match="not a regular file"):
        load_weights(tmp_path, SHAPES, MODEL, NAME)


def mutate(content: bytearray, chance: random.Random) -> bytes:
    """Change bytes, mostly of the header, or cut, repeat and insert some."""
    header = 8 + int.from_bytes(content[:8], "little")
    for _ in range(chance.choice([1, 1, 2, 5])):
        place = chance.randrange(header if chance.random() < 0.4 else len(content))
        kind = chance.randrange(6)
        if kind <= 1:
            content[place] = chance.randrange(256)
        elif kind == 2:
            content[place] ^= 1 << chance.randrange(8)
        elif kind == 3:
            del content[place : place + chance.choice([1, 4, 40])]
        elif kind == 4:
            content[place:place] = content[place : place + chance.choice([1, 4, 40])]
        else:  # a number that is not finite, or large
            content[place : place + 4] = chance.choice([b"\0\0\xc0\x7f", b"\0\0\x80\xff", b"\xff\xff\x7f\x7f", b"9999"])
        if not content:
            break
    return bytes(content)


def test_mutated_files_are_refused_or_give_finite_weights(path: Path) -> None:
    whole, chance = path.read_bytes(), random.Random(0)
    draw = torch.Generator().manual_seed(0)
    accepted = 0
    for _ in range(2000):
        path.write_bytes(mutate(bytearray(whole), chance))
        try:
            networks, _ = load_weights(path, SHAPES, MODEL, NAME)
        except FileError:
            continue
        accepted += 1
        for network, shape in zip(networks, SHAPES, strict=True):
            if network is None or shape is None:
                continue
            sizes = (1, shape.kv_heads, 4)
            keys, values = (torch.randn(*sizes, dim, generator=draw) * 100 for dim in shape[1:])
            found = network.weigh(Rows(keys, None), Rows(values, None), torch.zeros(1, 1, 4), 1, None, None)
            assert bool((found.isfinite() & (found > 0)).all())
    assert 100 < accepted < 1500, "some changes are of numbers that might have been trained"
