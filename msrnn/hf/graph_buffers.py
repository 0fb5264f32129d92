"""Buffers that states of one batch size share, one state at a time, and the CUDA graphs that were captured on them."""

from __future__ import annotations

import weakref
from typing import Any

from msrnn.core.slots import ordinary_tensors
from msrnn.core.state import MultiState
from msrnn.hf.captured_graph import Graph
from msrnn.hf.read_plan import Shape
from msrnn.recall import Recalling

Key = tuple[Shape, bool, Recalling | None, int]  # with `last_only`, and the segments that a search ranks


class GraphBuffers:
    """The buffers of one batch size, the graphs captured on them, and the state that owns them now, if any."""

    def __init__(self, state: MultiState) -> None:
        self.layers = [layer.share_buffers() for layer in state.layers]
        self.graphs: dict[Key, Graph | None] = {}
        self.owner = weakref.ref(state)

    @ordinary_tensors
    def assign(self, state: MultiState) -> None:
        """Copy a state into these buffers, which are then its own. The state that had them before gets a copy."""
        before = self.owner()
        if before is state:
            return
        for i, layer in enumerate(self.layers):
            for name, buffer in layer.tensors().items():
                if before is not None:
                    setattr(before.layers[i], name, buffer.clone())
                buffer.copy_(getattr(state.layers[i], name))
                setattr(state.layers[i], name, buffer)
        self.owner = weakref.ref(state)

    def empty_state(self, fingerprint: dict[str, Any]) -> MultiState:
        """An empty state in buffers that no state uses any more."""
        state = MultiState([layer.share_buffers() for layer in self.layers], fingerprint, columns=0)
        for layer in state.layers:  # not `state.reset`, which keeps the sizes of the sequences before
            layer.reset()
        self.owner = weakref.ref(state)
        return state
