"""Every answer's score, each made once, on all cores where one takes long."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from msrnn.evaluation.cells import Cell
from msrnn.evaluation.understanding.metrics import Metric, Score
from msrnn.evaluation.understanding.questions import Reference
from msrnn.evaluation.understanding.records import Asked, Records

MANY = 64  # answers for which processes are worth their start
AT_ONCE = 4  # answers that a process takes

Answer = tuple[str, tuple[Reference, ...]]
Scores = dict[Cell, list[Score]]


def scores(
    metric: Metric,
    records: Records,
    cells: Sequence[Cell],
    keys: Sequence[str],
    on_total: Callable[[int], object] = lambda _: None,
    on_score: Callable[[], object] = lambda: None,
) -> Scores:
    """Of every cell, in the order of the questions; all have been answered. What says the same is scored once."""
    asked = [records.asked[key] for key in keys]
    answers = {cell: [(_said(records, cell, one), tuple(one.references)) for one in asked] for cell in cells}
    different = list(dict.fromkeys(answer for some in answers.values() for answer in some))
    on_total(len(different))
    found: dict[Answer, Score] = {}
    for answer, score in zip(different, _scored(metric, different), strict=True):
        found[answer] = score
        on_score()
    return {cell: [found[answer] for answer in some] for cell, some in answers.items()}


def _said(records: Records, cell: Cell, asked: Asked) -> str:
    row = records.answer(*records.who(cell, asked))
    assert row is not None
    return str(row["prediction"])


def _scored(metric: Metric, answers: Sequence[Answer]) -> Iterator[Score]:
    texts, references = [text for text, _ in answers], [references for _, references in answers]
    if not metric.slow or len(answers) < MANY:
        yield from map(metric.score, texts, references)
        return
    # A fork would copy what torch's threads hold; an interruption is left to who started the processes.
    ignoring = signal.SIGINT, signal.SIG_IGN
    with ProcessPoolExecutor(torch.get_num_threads(), get_context("spawn"), signal.signal, ignoring) as pool:
        try:
            yield from pool.map(metric.score, texts, references, chunksize=AT_ONCE)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
