"""How good an answer is, as a share of 100: the best over the references, by the measures of SCROLLS and of QASPER."""

from __future__ import annotations

import importlib.util
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from msrnn.errors import UsageError
from msrnn.evaluation.understanding.questions import Reference

ROUGES = ("rouge1", "rouge2", "rougeL")


class Score(NamedTuple):
    values: list[float]  # one for each of the metric's parts
    kind: str = ""  # of the reference that was nearest


class Metric(NamedTuple):
    name: str
    parts: tuple[str, ...]
    score: Callable[[str, Sequence[Reference]], Score]
    check: Callable[[], None] = lambda: None  # refuses where a package is missing
    slow: bool = False

    def overall(self, means: Sequence[Any]) -> Any:
        """One number of the means of all parts: their geometric mean."""
        product = means[0]
        for part in means[1:]:
            product = product * part
        return product ** (1 / len(means))


def rouge(prediction: str, references: Sequence[Reference]) -> Score:
    """ROUGE-1, -2 and -L, stemmed: each one's F-measure with the reference at which it is largest."""
    found = [_scorer().score(reference.text, prediction) for reference in references]
    return Score([100 * max(scores[name].fmeasure for scores in found) for name in ROUGES])


@cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(ROUGES), use_stemmer=True)


def check_rouge() -> None:
    if importlib.util.find_spec("rouge_score") is None:
        raise UsageError(
            "scores need the package rouge-score, which is not installed: "
            "pip install 'msrnn[eval]', or add --stage answer and score elsewhere"
        )


def f1(prediction: str, references: Sequence[Reference]) -> Score:
    """The token F1 with the nearest reference, and that one's kind, as QASPER's own evaluation has it."""
    value, kind = max(((token_f1(prediction, one.text), one.kind) for one in references), key=lambda found: found[0])
    return Score([100 * value], kind)


def token_f1(prediction: str, truth: str) -> float:
    """SQuAD's: of the words that both have, each counted as often as in both."""
    said, true = normalised(prediction).split(), normalised(truth).split()
    common = sum((Counter(said) & Counter(true)).values())
    return 2 * common / (len(said) + len(true)) if common else 0.0


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and more than one space."""
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


ROUGE = Metric("geometric mean of ROUGE-1/2/L", ROUGES, rouge, check_rouge, slow=True)
F1 = Metric("token F1", ("f1",), f1)
