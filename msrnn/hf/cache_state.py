"""The state behind a transformers cache: who makes it, and who counts its columns."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from msrnn.core.state import MultiState
from msrnn.errors import UsageError
from msrnn.recall import Recalling

if TYPE_CHECKING:
    from msrnn.hf.state_spec import StateSpec


class CachedState:
    """A state that a cache reads into, shared by the cache's layers, and the columns that the cache reports.

    The caller counts the columns of the state (`MultiState.reading`). The cache may report any number to transformers.
    `recalling` says which tokens recall archived rows, where the state has an archive.
    """

    def __init__(self, state: MultiState | None, columns: int = 0, recalling: Recalling | None = None) -> None:
        self._state, self._columns, self.recalling = state, columns, recalling

    @property
    def exists(self) -> bool:
        return self._state is not None

    @property
    def state(self) -> MultiState:
        if self._state is None:
            raise UsageError("this cache has read nothing yet, and so holds no state: read a token first")
        return self._state

    @property
    def columns(self) -> int:
        """The columns before those that are read next, as the cache reports them."""
        return self._columns

    def report(self, columns: int) -> None:
        """Report this many columns more."""
        self._columns += columns

    def prepare(self, batch_size: int) -> None:
        """Make the state, if the batch size decides it."""

    @contextmanager
    def reading(self, layer: int, columns: int) -> Iterator[None]:
        """A layer reads the columns of a forward pass."""
        yield

    def reset(self) -> None:
        """Make the state empty."""
        self._columns = 0
        if self._state is not None:
            self._state.reset()


TAKES_BACK = 256  # columns of one forward pass that can be taken back: more than any draft


class OwnState(CachedState):
    """The state of a `MultiStateCache`: made for the first batch; counts a pass when all layers have read its columns.

    transformers calls the layers one by one, and does not say where a forward pass begins or ends. `columns` is the
    same number for every layer of a pass, in whatever order and on whatever devices they run. After a pass that ended
    early, the next one begins with a layer that has read already, and is refused.
    """

    def __init__(self, spec: StateSpec, host: list[Any]) -> None:
        super().__init__(None)
        self._spec = spec
        self._host = host  # the cache layers of linear attention, at their indices
        self._unread: set[int] = set()  # layers that have not read the columns of the pass in flight
        self.marks = False  # whether the last columns of each pass may be taken back

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
            if self.marks:
                self._mark(columns)
            state.begin_read(columns)
            self._unread = {i for i, shape in enumerate(self._spec.shapes) if shape is not None}
        elif layer not in self._unread:
            raise UsageError("this cache was interrupted inside a forward pass and is unusable: make a new one")
        self._unread.remove(layer)
        yield
        if not self._unread:
            state.end_read(columns)

    def _mark(self, columns: int) -> None:
        """Mark a pass of several columns, which may be a draft."""
        if columns > 1:
            self.state.mark(after=max(0, columns - TAKES_BACK))
        else:
            self.state.unmark()

    def take_back(self, columns: int) -> None:
        """Take back the last columns of a forward pass."""
        if columns and not self.marks:
            raise UsageError("call activate_past_recording() before the tokens that may be taken back")
        if columns:
            self.state.rewind(columns)

    def reset(self) -> None:
        for layer in self._host:
            layer.reset()
        super().reset()
