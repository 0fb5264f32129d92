"""Tracing, with bars that count tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrnn.cli.results import resumed
from msrnn.cli.terminal import note, progress

if TYPE_CHECKING:
    from msrnn.analysis.explorer.page import Shown
    from msrnn.analysis.study import Cell, Study
    from msrnn.analysis.trace_store import Traced, Traces
    from msrnn.evaluation.data.chunks import Data


def studied(
    model: Any,
    data: Data,
    cells: list[Cell],
    folder: Path,
    batch: int | None,
    told: dict[str, str],
    tags: list[list[str]] | None,
) -> Study:
    """Every cell traced, with a bar that counts the tokens still to be read."""
    import numpy

    from msrnn.analysis.study import study
    from msrnn.analysis.trace_store import Traces, stored_cells

    ids = numpy.array([chunk.ids for chunk in data.chunks])
    stores = {cell: Traces(folder, model, *cell, beside=told) for cell in cells}
    missing = sum(len(store.missing(ids)) for store in stores.values())
    resumed(len(stores) * len(ids) - missing, len(stores) * len(ids), "traces")
    if not missing:
        note("nothing left to trace")
    with progress() as bar:
        task = bar.add_task("", total=missing * data.length)
        for store in stores.values():
            trace_all(store, ids, batch, bar, task)

    for cell in stored_cells(folder):  # of earlier commands: the tables of a folder show all that is in it
        if cell not in stores and cell[1] + 1 < data.length:
            earlier = Traces(folder, model, *cell, beside=told)
            if not earlier.missing(ids):
                stores[cell] = earlier

    def load(cell: Cell) -> Iterator[Traced]:
        return (stores[cell].load(row) for row in ids)

    return study(list(stores), load, ids, tags)


def trace_all(store: Traces, ids: Any, batch: int | None, bar: Any, task: Any) -> None:
    if not store.missing(ids):
        return
    bar.update(task, description=store.label)
    if bar.disable:
        note(store.label)
    store.fill(ids, batch or (8 if store.rnn.model.device.type == "cuda" else 1), partial(bar.advance, task))


def traced_all(model: Any, ids: list[int], names: list[str], size: int) -> list[Shown]:
    """One text under each policy, with a bar for each."""
    from msrnn.analysis.explorer.page import Shown
    from msrnn.analysis.trace_store import traced
    from msrnn.hf.rnn import MultiStateRNN

    shown = []
    with progress() as bar:
        for name in names:
            if bar.disable:
                note(f"reading {len(ids):,} tokens under {name}")
            task = bar.add_task(f"reading under {name}", total=len(ids))
            (one,) = traced(MultiStateRNN(model, name, size), [ids], partial(bar.advance, task))
            shown.append(Shown(name, size, one))
    return shown
