"""Cells of an evaluation as tasks of a Ray cluster.

A worker sends each row as soon as it is computed; only the process that was asked writes them. If a worker dies, what
its cell still lacks is computed again. On a CPU a worker loads the model once; Ray starts a new process for every task
that has a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from msrnn.core.ray_cluster import Cluster, reachable
from msrnn.errors import UsageError
from msrnn.evaluation.runner import Computed, ModelRunner
from msrnn.evaluation.store import Row
from msrnn.hf.loading import load

ATTEMPTS = 3  # deaths of workers, one after another, without a row of their cell in between
Run = ModelRunner[Any, Any, Any]


class Source(NamedTuple):
    """Where a worker loads its model from."""

    name: str | None
    device: str
    dtype: str | None


class RayWorkers:
    def __init__(self, cluster: Cluster, model: str | None, dtype: str | None) -> None:
        self.cluster = cluster
        self.device = cluster.device
        # By the workers' device: this process, which only identifies the weights, may have another one.
        self.dtype = dtype or ("float32" if cluster.device == "cpu" else "auto")
        self.source = Source(reachable(model), cluster.device, self.dtype)

    def computed(self, run: Run, missing: dict[Any, list[Any]]) -> Iterator[Computed]:
        """Compute these items of each cell, in any order; rows come as they are computed."""
        tasks = _Tasks(self.cluster, self.source, run)
        waiting = dict(missing)
        try:
            while waiting or tasks:
                for cell in [cell for cell in waiting if not any(map(run.missing, run.needs(cell)))]:
                    tasks.start(cell, waiting.pop(cell))
                yield from tasks.next()
        finally:
            tasks.cancel()

    def close(self) -> None:
        self.cluster.close()


class _Tasks:
    """The tasks that are under way."""

    def __init__(self, cluster: Cluster, source: Source, run: Run) -> None:
        self._ray, self._run = cluster.ray, run
        self._sent = self._ray.put(run.sent())
        options = {**cluster.worker, "num_returns": "streaming", "max_retries": 0}
        self._task = self._ray.remote(**options)(_computed_by_worker).remote
        self._source = source
        self._cells: dict[Any, Any] = {}  # by the generator of a task's results
        self._deaths: dict[Any, int] = {}

    def __bool__(self) -> bool:
        return bool(self._cells)

    def start(self, cell: Any, items: list[Any]) -> None:
        run = self._run
        rows = [row for one in (cell, *run.needs(cell)) for row in run.store.done(run.row_key(one))]
        self._cells[self._task(self._source, self._sent, cell, items, rows)] = cell

    def next(self) -> Iterator[Computed]:
        """What comes next, of any task."""
        (task, *_), _ = self._ray.wait([*self._cells], num_returns=1)
        cell, errors = self._cells[task], self._ray.exceptions
        try:
            found = self._ray.get(next(task))
        except StopIteration:
            del self._cells[task]
        except errors.RayTaskError as error:  # the same error would come again
            raise error.cause if isinstance(error.cause, UsageError) else error from None
        except errors.RayError as error:
            del self._cells[task]
            self._deaths[cell] = self._deaths.get(cell, 0) + 1
            if self._deaths[cell] == ATTEMPTS:
                reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                raise UsageError(
                    f"{cell.label}: {ATTEMPTS} workers failed, one after another ({reason}); what was computed is "
                    "kept: mend the cluster and run the same command"
                ) from error
            self._ray.cancel(task, force=True)  # if only its result is lost
            if items := self._run.missing(cell):
                self.start(cell, items)
        else:
            if found.row is not None:
                self._deaths[cell] = 0
            yield found

    def cancel(self) -> None:
        for task in self._cells:
            self._ray.cancel(task, force=True)


def _computed_by_worker(source: Source, sent: Run, cell: Any, items: list[Any], rows: list[Row]) -> Iterator[Computed]:
    run = sent.received(_model(source), rows)
    counted: list[int] = []
    yield Computed(cell, None, 0)
    for row in run.computed(cell, items, counted.append):
        yield Computed(cell, row, sum(counted))
        counted.clear()


@lru_cache(maxsize=1)
def _model(source: Source) -> Any:
    """The model of this worker, which its next tasks use again."""
    return load(*source).model
