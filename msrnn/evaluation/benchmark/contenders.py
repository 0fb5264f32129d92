"""The contenders that the benchmark measures: bounded models, the full model, and any other decode step."""

from __future__ import annotations

import os
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from msrnn.core.device_memory import if_it_fits
from msrnn.core.rope import ORIGINAL
from msrnn.core.slots import LayerShape, Slots
from msrnn.core.state import MultiState
from msrnn.errors import UsageError
from msrnn.evaluation.benchmark import NATIVE
from msrnn.evaluation.benchmark.timing import capture_graph, milliseconds
from msrnn.hf.captured_graph import compile_model, layers_share_code
from msrnn.hf.rnn import MultiStateRNN
from msrnn.policy import Policy
from msrnn.size import Size, joint_name, parse_policy

BUCKET = 512  # rows by which the cache of the full model grows

Step = Callable[[], object]


class Contender(Protocol):
    """Takes decode steps from states that hold random keys and values."""

    label: str
    size: int | None  # KV rows that a layer may hold; None: every token is kept
    nbytes: int  # of one sequence's state
    rows: int  # KV rows that a layer holds at the end of a sequence
    buckets: Sequence[int]  # rows at which steps are timed for a whole sequence; empty: it is not measured

    def stepping(self, batch: int, rows: int) -> AbstractContextManager[Step]:
        """A decode step of `batch` sequences whose layers hold `rows` KV rows; it can be called many times."""

    def reading(self, input_ids: Tensor) -> Step | None:
        """The prefill of prompts [B, T]; None: not measured."""


class Setup(NamedTuple):
    """The model and sequence length that contenders are built from."""

    model: PreTrainedModel
    shapes: list[LayerShape | None]  # of its layers; None: linear attention
    length: int  # tokens of a whole sequence


Factory = Callable[[Setup, int], Contender]


def setup(model: PreTrainedModel, length: int) -> Setup:
    return Setup(model, MultiStateRNN(model, "full").spec.shapes, length)


def row_bytes(shapes: list[LayerShape | None]) -> int:
    """Bytes of one token's keys and values, over all layers."""
    return sum(s.kv_heads * (s.key_dim + s.value_dim) * s.dtype.itemsize for s in shapes if s)


def random_tokens(model: PreTrainedModel, batch: int, count: int = 1) -> Tensor:
    vocabulary: Any = model.get_input_embeddings().num_embeddings
    return torch.randint(0, int(vocabulary), (batch, count), device=model.device)


class Bounded(Contender):
    """A `MultiStateRNN` at one size. Its step takes the same time at any length."""

    def __init__(
        self,
        model: PreTrainedModel,
        policy: str | Policy,
        size: int,
        state_dtype: str | None = None,
        compile: bool = False,
        positions: str = ORIGINAL,
    ) -> None:
        value, budget = parse_policy(policy)
        options: dict[str, Any] = {"state_dtype": state_dtype, "compile": compile, "positions": positions}
        self.rnn = MultiStateRNN(model, value, Size(size, budget), **options)
        other = None if positions == ORIGINAL else positions
        self.label = " ".join(str(word) for word in (joint_name(value, budget), size, state_dtype, other) if word)
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
            held.clear()  # frees the state even if the caller keeps the step
            self.rnn.release()

    def reading(self, input_ids: Tensor) -> Step:
        return lambda: self.rnn.read(input_ids, self.rnn.state(input_ids.shape[0]), last_only=True)


def fill(state: MultiState) -> None:
    """Fill every slot but the spare one with random KV rows."""
    for layer in state.layers:
        if not isinstance(layer, Slots):
            continue
        size = layer.position.shape[-1] - 1
        layer.position[..., :size] = torch.arange(size, device=layer.position.device)
        layer.seen.fill_(size)
        for name, tensor in layer.tensors().items():
            if name in ("keys", "values"):
                randomize(tensor)
            elif name in ("importance", "row_weight"):
                tensor.uniform_()
            elif name in ("key_scale", "value_scale"):
                tensor.fill_(1 / 32 if layer.keys.dtype == torch.int8 else 1)


def randomize(tensor: Tensor) -> None:
    if tensor.dtype == torch.int8:
        tensor.random_(-127, 128)
    elif tensor.dtype.itemsize == 1:  # torch draws no random 8-bit floats
        for row in tensor:
            row.copy_(torch.randn(row.shape, device=row.device))
    else:
        tensor.normal_()


@contextmanager
def attending(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model with another attention implementation, by its name in transformers."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def use_default_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """The model as transformers runs it by default."""
    return attending(model, "sdpa")


class PlacedLayer(StaticLayer):
    """A static layer that writes at a `position` [1] which all layers share.

    The caller sets the position: if layers counted themselves, replaying a graph would run past the end.
    """

    def __init__(self, rows: int, position: Tensor) -> None:
        super().__init__(max_cache_len=rows)
        self.position = position
        self.cumulative_length = position  # what transformers' own layer has there

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(2, self.position, key_states)
        self.values.index_copy_(2, self.position, value_states)
        return self.keys, self.values


def make_placed_cache(model: PreTrainedModel, rows: int, position: Tensor) -> Cache:
    layers = StaticCache(config=model.config, max_cache_len=rows).layers
    return Cache(layers=[PlacedLayer(rows, position) for _ in layers])


class StaticFull(Contender):
    """The full model with a static cache that grows by buckets of rows, each with its CUDA graph.

    With `compile`, its step is the faster of two: as it is, and compiled by torch. The time and memory of copying the
    cache into a larger one are not counted.
    """

    label, size = "full", None

    def __init__(self, setup: Setup, compile: bool = False) -> None:
        self.model, self.rows, self.compile = setup.model, setup.length, compile
        self.nbytes = setup.length * row_bytes(setup.shapes)
        self.buckets = (*range(BUCKET, setup.length, BUCKET), setup.length)

    @staticmethod
    def possible(model: PreTrainedModel) -> bool:
        """Whether all layers attend to everything: static caches of sliding and linear layers cannot be captured."""
        return all(type(layer) is StaticLayer for layer in StaticCache(config=model.config, max_cache_len=1).layers)

    @contextmanager
    def stepping(self, batch: int, rows: int) -> Iterator[Step]:
        device = self.model.device
        position = torch.full((1,), rows - 1, device=device)
        cache = make_placed_cache(self.model, rows, position)
        ids = random_tokens(self.model, batch)

        def step(forward: Callable[..., object]) -> object:
            places = position.expand(batch, 1)
            return forward(input_ids=ids, position_ids=places, past_key_values=cache, use_cache=True)

        with use_default_attention(self.model), torch.no_grad():
            step(self.model)
            for layer in cache.layers:
                assert isinstance(layer, PlacedLayer)
                assert layer.keys is not None
                assert layer.values is not None
                layer.keys.normal_()
                layer.values.normal_()
            steps = [capture_graph(partial(step, self.model), device)]
            if self.compile and device.type == "cuda":
                torch._dynamo.reset()  # after some shapes, torch would compile no more, without a word
                try:
                    with layers_share_code():
                        fast = if_it_fits(
                            lambda: capture_graph(partial(step, compile_model(self.model, batch)), device)
                        )
                except torch._dynamo.exc.TorchDynamoException as error:
                    reason = (str(error) or type(error).__name__).splitlines()[0]
                    warnings.warn(
                        f"torch cannot compile the full model, so it is not compiled ({reason})", stacklevel=3
                    )
                    fast = None
                steps += [fast] if fast else []
            timed = {milliseconds(work, device, repeats=5).median: work for work in steps} if len(steps) > 1 else {}
            yield timed[min(timed)] if timed else steps[0]

    @torch.no_grad()
    def _prefill(self, input_ids: Tensor) -> object:
        with use_default_attention(self.model):
            return self.model(input_ids, logits_to_keep=1, use_cache=False)

    def reading(self, input_ids: Tensor) -> Step:
        return lambda: self._prefill(input_ids)


class DynamicFull(Contender):
    """The full model with the default cache of transformers, which is concatenated for every token; no graphs."""

    label, size, buckets = "full, dynamic", None, ()

    def __init__(self, setup: Setup) -> None:
        self.model, self.shapes, self.rows = setup.model, setup.shapes, setup.length
        self.nbytes = setup.length * row_bytes(setup.shapes)

    @contextmanager
    def stepping(self, batch: int, rows: int) -> Iterator[Step]:
        cache = DynamicCache(config=self.model.config)
        self._fill(cache, batch, rows - 1)
        ids = random_tokens(self.model, batch)
        position = torch.full((batch, 1), rows - 1, device=self.model.device)

        def step() -> None:
            self.model(input_ids=ids, position_ids=position, past_key_values=cache, use_cache=True)
            for layer in cache.layers:
                if type(layer) is DynamicLayer:
                    layer.crop(-1)  # every step has the same length

        with use_default_attention(self.model), torch.no_grad():
            yield step

    def _fill(self, cache: Cache, batch: int, rows: int) -> None:
        for i, shape in enumerate(self.shapes):
            if shape and rows:
                sizes = (batch, shape.kv_heads, rows)
                keys = torch.randn(*sizes, shape.key_dim, dtype=shape.dtype, device=shape.device)
                values = torch.randn(*sizes, shape.value_dim, dtype=shape.dtype, device=shape.device)
                cache.update(keys, values, i)

    def reading(self, _: Tensor) -> None:
        return None


@dataclass(frozen=True)
class Lineup:
    """The full model; a policy at every size, state dtype and position mode; and others at every size."""

    policy: str | Policy
    sizes: Sequence[int]
    state_dtypes: Sequence[str] = (NATIVE,)
    compile: bool = False
    positions: Sequence[str] = (ORIGINAL,)
    others: Sequence[Factory] = ()

    def contenders(self, setup: Setup, note: Callable[[str], object]) -> Iterator[Contender]:
        """Yield one contender at a time, so that each can use all memory; the full model first."""
        if StaticFull.possible(setup.model):
            yield StaticFull(setup, self.compile)
        else:
            note("this model has sliding or linear layers: the full model is measured with its dynamic cache only")
        yield DynamicFull(setup)
        for positions, dtype, size in product(self.positions, self.state_dtypes, self.sizes):
            code = None if dtype == NATIVE else dtype
            yield Bounded(setup.model, self.policy, size, code, self.compile, positions)
        for factory in self.others:
            for size in self.sizes:
                yield factory(setup, size)


def load_factory(name: str) -> Factory:
    """The function MODULE:ATTRIBUTE; the module may be in the working folder."""
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise UsageError(f"contender {name!r}: must be MODULE:ATTRIBUTE, as in benchmarks.published:published")
    sys.path.insert(0, folder := os.getcwd())
    try:
        factory = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"contender {name!r}: cannot be imported ({error}); check the name") from error
    finally:
        sys.path.remove(folder)
    if not callable(factory):
        raise UsageError(f"contender {name!r}: is a {type(factory).__name__}; must be a function of a setup and a size")
    return factory  # type: ignore[no-any-return]
