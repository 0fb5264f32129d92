"""Traces made by hand, with obvious results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest

from msrnn.analysis import tables
from msrnn.analysis.study import Study, study
from msrnn.hf.trace import ChunkTrace

Visit = Callable[..., Any]  # opens a page in a browser, which it returns

# Eight tokens, two states: a step sees at most three. Rows are layers; one group.
# Layer 0 is a window: token j is seen at steps j, j + 1 and j + 2.
# Layer 1 keeps token 0 for ever and otherwise only what is newest: token j is seen at j and j + 1.
LENGTH, SIZE = 8, 2
WINDOW = [2, 3, 4, 5, 6, 7, 8, 8]
SINK = [8, 2, 3, 4, 5, 6, 7, 8]


def traced(*layers: list[list[int]] | list[int], size: int = SIZE) -> ChunkTrace:
    """A trace from eviction times by layer, or by layer and head."""
    times = numpy.array(layers, dtype=numpy.int32)
    times = times[:, None] if times.ndim == 2 else times
    return ChunkTrace(times, tuple(range(len(layers))), (size,) * len(layers))


# Chunks of one policy: a window in both layers, then a sink in both. Another: heads that differ in layer 0.
PLAIN = [traced(WINDOW, WINDOW), traced(SINK, SINK)]
HEADS = [traced([WINDOW, SINK], [WINDOW, WINDOW])] * 2
IDS = numpy.array([[5, 1, 2, 3, 4, 1, 2, 7], [5, 1, 1, 1, 9, 9, 9, 9]])
TAGS = [["NN", ".", "NN", ".", "XX", ".", "newline", "NN"], ["NN", *["."] * 3, *["no word"] * 4]]
NAMES = {"retention", "recent", "recent-by-layer", "first-positions", "tags", "lifetimes", "longest-lived"}
NAMES |= {"policies", "layers", "heads"}  # tables
TRACES = {("tova", SIZE): PLAIN, ("h2o", SIZE): HEADS}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Study:
    monkeypatch.setattr(tables, "OFTEN", 2)
    return study(list(TRACES), TRACES.__getitem__, IDS, TAGS)
