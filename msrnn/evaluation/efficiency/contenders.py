"""Who is measured: a model with a bounded state, and whatever else can take a decode step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.core.rope import ORIGINAL
from msrnn.core.slots import LayerShape, Slots
from msrnn.core.state import MultiState
from msrnn.hf.rnn import MultiStateRNN

Step = Callable[[], object]


class Contender(Protocol):
    """Takes decode steps from states that hold random keys and values, as if it had read."""

    label: str
    size: int | None  # states that a layer may hold; None: every token is kept
    nbytes: int  # of one sequence's states
    rows: int  # states in a layer that is full
    buckets: Sequence[int]  # rows at which a step's time is taken for a whole sequence; none: it is not taken

    def stepping(self, batch: int, rows: int) -> AbstractContextManager[Step]:
        """A step of so many sequences with so many rows filled, to be called again and again."""

    def reading(self, input_ids: Tensor) -> Step | None:
        """The prompts [B, T] read from the start; None: not measured."""


class Setup(NamedTuple):
    """What a contender is made from."""

    model: PreTrainedModel
    shapes: list[LayerShape | None]  # of its layers; None: linear attention
    length: int  # tokens of a whole sequence


Factory = Callable[[Setup, int], Contender]


def setup(model: PreTrainedModel, length: int) -> Setup:
    return Setup(model, MultiStateRNN(model, "full").spec.shapes, length)


def row_bytes(shapes: list[LayerShape | None]) -> int:
    """Bytes of one token's keys and values in all layers."""
    return sum(s.kv_heads * (s.key_dim + s.value_dim) * s.dtype.itemsize for s in shapes if s)


def random_tokens(model: PreTrainedModel, batch: int, count: int = 1) -> Tensor:
    vocabulary: Any = model.get_input_embeddings().num_embeddings
    return torch.randint(0, int(vocabulary), (batch, count), device=model.device)


class Bounded(Contender):
    """A `MultiStateRNN` at one size. Its step has one time, however long the text."""

    def __init__(
        self,
        model: PreTrainedModel,
        policy: str,
        size: int,
        state_dtype: str | None = None,
        compile: bool = False,
        positions: str = ORIGINAL,
    ) -> None:
        self.rnn = MultiStateRNN(model, policy, size, state_dtype=state_dtype, compile=compile, positions=positions)
        moved = None if positions == ORIGINAL else positions
        self.label = " ".join(str(word) for word in (policy, size, state_dtype, moved) if word)
        self.size, self.rows, self.buckets = size, size, (size,)
        self.nbytes = self.rnn.state().nbytes

    @contextmanager
    def stepping(self, batch: int, rows: int) -> Iterator[Step]:
        state = self.rnn.state(batch)
        fill(state)
        ids = random_tokens(self.rnn.model, batch)
        held = [state]
        del state
        try:
            yield lambda: self.rnn.step(ids, held[0])
        finally:
            held.clear()  # the step may outlive its time
            self.rnn.release()

    def reading(self, input_ids: Tensor) -> Step:
        return lambda: self.rnn.read(input_ids, self.rnn.state(input_ids.shape[0]), last_only=True)


def fill(state: MultiState) -> None:
    """Random states in every slot but the spare one."""
    for layer in state.layers:
        if not isinstance(layer, Slots):
            continue
        size = layer.position.shape[-1] - 1
        layer.position[..., :size] = torch.arange(size, device=layer.position.device)
        layer.seen.fill_(size)
        for name, tensor in layer.tensors().items():
            if name in ("keys", "values"):
                randomize(tensor)
            elif name in ("importance", "norm"):
                tensor.uniform_()
            elif name in ("key_scale", "value_scale"):
                tensor.fill_(1 / 32 if layer.keys.dtype == torch.int8 else 1)


def randomize(tensor: Tensor) -> None:
    if tensor.dtype == torch.int8:
        tensor.random_(-127, 128)
    elif tensor.dtype.itemsize == 1:  # 8-bit floats know no distribution of their own
        for row in tensor:
            row.copy_(torch.randn(row.shape, device=row.device))
    else:
        tensor.normal_()
