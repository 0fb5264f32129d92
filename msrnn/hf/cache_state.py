"""The state of a `MultiStateCache`, whose layers transformers calls one by one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from msrnn.errors import UsageError
from msrnn.hf.cache_layers import CachedState
from msrnn.hf.state_spec import StateSpec


class OwnState(CachedState):
    """A state that is made for the first batch, and counts a forward pass when all layers have read its columns.

    So `columns` is the same number for every layer of a pass, in whatever order and on whatever device they run. A
    pass that ends early leaves some layers unread: the next one begins with a layer that has read already.
    """

    def __init__(self, spec: StateSpec, host: list[Any]) -> None:
        super().__init__(None)
        self._spec = spec
        self._host = host  # the cache layers of linear attention, at their indices
        self._unread: set[int] = set()  # layers that have not read the columns of the pass in flight

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnState:
        """A copy of the state, for the same model."""
        other = copy.copy(self)
        other._host, other._state = copy.deepcopy((self._host, self._state), memo)
        other._unread = set(self._unread)
        return other

    @property
    def columns(self) -> int:
        return self.state.columns if self.exists else 0

    def prepare(self, batch_size: int) -> None:
        if self._state is None:
            self._state = self._spec.state(batch_size, self._host)

    @contextmanager
    def reading(self, layer: int, columns: int) -> Iterator[None]:
        state = self.state
        if state.whole:
            self._spec.check_gaps(state.columns + columns)
            state.begin_read(columns)
            self._unread = {i for i, shape in enumerate(self._spec.shapes) if shape is not None}
        elif layer not in self._unread:
            raise UsageError("this cache was interrupted inside a forward pass and is unusable: make a new one")
        self._unread.remove(layer)
        yield
        if not self._unread:
            state.end_read(columns)

    def reset(self) -> None:
        for layer in self._host:
            layer.reset()
        super().reset()
