"""States of several kinds, saved in files that tests may forge."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save as to_bytes
from torch import Tensor

import msrnn
from msrnn.core.state_file import checksum, load_tensors
from msrnn.policy import Policy
from tests.helpers.tiny import FAMILIES, build, llama, tokens

Tensors = dict[str, Tensor]
SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
KINDS: dict[str, dict[str, Any]] = {
    "head": {"policy": "h2o", "size": 6},
    "value": {"policy": Policy(0.9, recent=0.5, value_norm=True), "size": 5, "state_dtype": "int8"},
    "random": {"policy": "random", "size": 5},
    "fp8": {"policy": "echo", "size": 5, "state_dtype": "fp8"},
    "horizon": {"policy": "tova+1~12", "size": 6, "positions": "compressed"},
    "full": {"policy": "full", "size": None},
    "sliding": {"policy": "tova", "size": 20},
}


class Saved:
    """A state of one kind: as it was saved, and the models that go on from it."""

    def __init__(self, kind: str, folder: Path) -> None:
        layers = 2 if kind in ("head", "full") else 1
        if kind == "sliding":
            config = FAMILIES["mistral-sliding"]()
            config.num_hidden_layers = 1
        else:
            config = llama(2, 2, **{**SMALL, "num_hidden_layers": layers})
        model = build(config)
        self.path, self.huge = folder / kind, True
        self.rnns = [msrnn.MultiStateRNN(model, backend=b, chunk=8, **KINDS[kind]) for b in ("numba", "torch")]
        self.state = self.rnns[0].state(2)
        self.rnns[0].read(tokens(2, 17), self.state)
        self.state.save(self.path)
        self.whole = self.path.read_bytes()
        self.tensors, self.description = load_tensors(self.path)
        self.tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}

    def write(self, tensors: Tensors, description: object) -> None:
        """With the checksum that fits, as whoever forges a file would write it."""
        if isinstance(description, dict):
            description = {**description, "checksum": checksum(tensors)}
        self.path.write_bytes(to_bytes(tensors, {"msrnn": json.dumps(description)}))

    def edited(self, **edits: Callable[[Tensor], Any]) -> None:
        """`edited(position=...)`: change the first layer's tensors in place."""
        tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        for name, edit in edits.items():
            edit(tensors[f"0.{name}"])
        self.write(tensors, self.description)
