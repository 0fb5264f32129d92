"""Scores of answers in percent: ROUGE as in SCROLLS, and the token F1 of QASPER. The best reference counts."""

from __future__ import annotations

import importlib.util
import re
import signal
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from msrnn.errors import UsageError
from msrnn.evaluation.cells import Cell
from msrnn.evaluation.data.questions import Reference
from msrnn.evaluation.tasks.answers import Answers, StoredQuestion

ROUGES = ("rouge1", "rouge2", "rougeL")
WORTH_PROCESSES = 64  # answers for which it pays to start processes
CHUNK = 4  # answers that a process takes at once


class Score(NamedTuple):
    values: list[float]  # one for each part of the metric
    kind: str = ""  # of the best reference


class Metric(NamedTuple):
    name: str
    parts: tuple[str, ...]
    score: Callable[[str, Sequence[Reference]], Score]
    check: Callable[[], None] = lambda: None  # refuses where a package is missing
    slow: bool = False

    def overall(self, means: Sequence[Any]) -> Any:
        """The geometric mean of the means of all parts."""
        product = means[0]
        for part in means[1:]:
            product = product * part
        return product ** (1 / len(means))


def rouge(prediction: str, references: Sequence[Reference]) -> Score:
    """The F-measures of ROUGE-1, -2 and -L, stemmed; for each, the reference with the largest."""
    rouge_scores = [_scorer().score(reference.text, prediction) for reference in references]
    return Score([100 * max(scores[name].fmeasure for scores in rouge_scores) for name in ROUGES])


@cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(ROUGES), use_stemmer=True)


def check_rouge() -> None:
    if importlib.util.find_spec("rouge_score") is None:
        raise UsageError(
            "scores need the package rouge-score, which is not installed: "
            "pip install 'msrnn[eval]', or only answer here and score elsewhere"
        )


def f1(prediction: str, references: Sequence[Reference]) -> Score:
    """The largest token F1 over the references, and the kind of that reference, as in QASPER's own evaluation."""
    value, kind = max(((token_f1(prediction, one.text), one.kind) for one in references), key=lambda score: score[0])
    return Score([100 * value], kind)


def token_f1(prediction: str, truth: str) -> float:
    """SQuAD's F1 of words; a word counts as often as both texts have it."""
    predicted, true = normalise(prediction).split(), normalise(truth).split()
    common = sum((Counter(predicted) & Counter(true)).values())
    return 2 * common / (len(predicted) + len(true)) if common else 0.0


def normalise(text: str) -> str:
    """Lower case, without punctuation, articles and repeated spaces."""
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


ROUGE = Metric("geometric mean of ROUGE-1/2/L", ROUGES, rouge, check_rouge, slow=True)
F1 = Metric("token F1", ("f1",), f1)

Scored = tuple[str, tuple[Reference, ...]]  # an answer and its references
Scores = dict[Cell, list[Score]]


def scores(
    metric: Metric,
    answers: Answers,
    cells: Sequence[Cell],
    keys: Sequence[str],
    on_total: Callable[[int], object] = lambda _: None,
    on_score: Callable[[], object] = lambda: None,
) -> Scores:
    """The scores of every cell, by question; all questions are answered. Equal answers are scored once."""
    questions = [answers.questions[key] for key in keys]
    texts = {cell: [(_prediction(answers, cell, one), tuple(one.references)) for one in questions] for cell in cells}
    different = list(dict.fromkeys(text for some in texts.values() for text in some))
    on_total(len(different))
    scored: dict[Scored, Score] = {}
    for text, score in zip(different, _score_all(metric, different), strict=True):
        scored[text] = score
        on_score()
    return {cell: [scored[text] for text in some] for cell, some in texts.items()}


def _prediction(answers: Answers, cell: Cell, question: StoredQuestion) -> str:
    row = answers.answer(cell, question)
    assert row is not None
    return str(row["prediction"])


def _score_all(metric: Metric, answers: Sequence[Scored]) -> Iterator[Score]:
    texts, references = [text for text, _ in answers], [references for _, references in answers]
    if not metric.slow or len(answers) < WORTH_PROCESSES:
        yield from map(metric.score, texts, references)
        return
    # A fork would copy locks that torch's threads hold. Only this process handles Ctrl-C.
    ignore = signal.SIGINT, signal.SIG_IGN
    with ProcessPoolExecutor(torch.get_num_threads(), get_context("spawn"), signal.signal, ignore) as pool:
        try:
            yield from pool.map(metric.score, texts, references, chunksize=CHUNK)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
