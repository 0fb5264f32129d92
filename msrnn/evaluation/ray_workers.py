"""Cells of an evaluation as tasks of a Ray cluster.

A worker sends each record as soon as it is computed; only the process that was asked writes them. If a worker dies,
the rest of its cell is computed again. On a CPU a worker loads the model once; Ray starts a new process for every task
that has a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from msrnn.core.ray_cluster import Cluster, reachable
from msrnn.errors import UsageError
from msrnn.evaluation.environment import environment, model_identity
from msrnn.evaluation.runner import Message, Runner
from msrnn.evaluation.store import Record, Store
from msrnn.evaluation.task import Task
from msrnn.hf.loading import load

ATTEMPTS = 3  # deaths of workers, one after another, without a record of their cell in between
Run = Runner[Any, Any, Any]


class Source(NamedTuple):
    """Where a worker loads its model from."""

    name: str | None
    device: str
    dtype: str | None


class Sent(NamedTuple):
    """A run as a worker gets it, which has neither its model nor its records."""

    task: Task[Any, Any, Any]
    batch: int | None
    metadata: Record


class RayWorkers:
    def __init__(self, cluster: Cluster, model: str | None, dtype: str | None) -> None:
        self.cluster = cluster
        self.device = cluster.device
        # By the workers' device: this process, which only identifies the weights, may have another one.
        self.dtype = dtype or ("float32" if cluster.device == "cpu" else "auto")
        self.source = Source(reachable(model), cluster.device, self.dtype)

    def compute_cells(self, run: Run, missing: dict[Any, list[Any]]) -> Iterator[Message]:
        """Compute these items of each cell, in any order; records come as they are computed."""
        tasks = _Tasks(self.cluster, self.source, run)
        waiting = dict(missing)
        try:
            while waiting or tasks:
                for cell in [cell for cell in waiting if not any(map(run.missing, run.task.needs(cell)))]:
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
        self._sent = self._ray.put(Sent(run.task, run.given_batch, run.metadata))
        options = {**cluster.worker, "num_returns": "streaming", "max_retries": 0}
        self._task = self._ray.remote(**options)(_compute_cell).remote
        self._source = source
        self._cells: dict[Any, Any] = {}  # by the generator of a task's results
        self._deaths: dict[Any, int] = {}

    def __bool__(self) -> bool:
        return bool(self._cells)

    def start(self, cell: Any, items: list[Any]) -> None:
        run = self._run
        records = [record for one in (cell, *run.task.needs(cell)) for record in run.find_done(one)]
        self._cells[self._task(self._source, self._sent, cell, items, records)] = cell

    def next(self) -> Iterator[Message]:
        """The next messages of any task."""
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
            if found.record is not None:
                self._deaths[cell] = 0
            yield found

    def cancel(self) -> None:
        for task in self._cells:
            self._ray.cancel(task, force=True)


def _compute_cell(source: Source, sent: Sent, cell: Any, items: list[Any], records: list[Record]) -> Iterator[Message]:
    """The work of one worker."""
    run = _runner_of(sent, _model(source), records)
    counted: list[int] = []
    yield Message(cell, None, 0)
    for record in run.compute_items(cell, items, counted.append):
        yield Message(cell, record, sum(counted))
        counted.clear()


def _runner_of(sent: Sent, model: PreTrainedModel, records: list[Record]) -> Run:
    """The run in the worker, with the records that its work needs."""
    found = model_identity(model)
    for name in ("fingerprint", "dtype"):
        if found[name] != sent.task.key[name]:
            raise UsageError(
                f"a worker's model has {name} {found[name]} instead of {sent.task.key[name]}: give all machines the "
                "same model and dtype"
            )
    store = Store(None)
    store.records = records
    run = Runner(sent.task, store, model, sent.batch)
    here = {**environment(model.device), "backend": found["backend"], "batch": run.batch}
    run.metadata = {**sent.metadata, **here}
    return run


@lru_cache(maxsize=1)
def _model(source: Source) -> Any:
    """The model of this worker, which its next tasks use again."""
    return load(*source).model
