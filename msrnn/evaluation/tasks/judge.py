"""A judge compares each story of a bounded model with the full model's of the same seed, in both orders."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from msrnn.errors import FileError
from msrnn.evaluation import statistics
from msrnn.evaluation.cells import FULL_MODEL, Cell, cell_of
from msrnn.evaluation.data.prompts import JUDGE, STORY, filled
from msrnn.evaluation.report import Formatted, Table, document, saved_figure
from msrnn.evaluation.runner import Progress, Runner
from msrnn.evaluation.schemas import Schema, Text, check_of
from msrnn.evaluation.statistics import Estimate
from msrnn.evaluation.store import Record, Store
from msrnn.evaluation.task import Compute, Job, OnTokens, Task
from msrnn.evaluation.tasks.judge_models import ANSWER_TOKENS, FINGERPRINT, LIKELIHOODS, EndpointFailedError, Judge
from msrnn.evaluation.tasks.story import SAMPLER, evicted

NAME = "judge"


class JudgementSchema(Schema):
    judge: Text
    prompt: Text
    answer: Text


CHECK = check_of(JudgementSchema)
STORY_KEY = ("fingerprint", "dtype", "prompt", "most", "temperature")  # what stories must share to be compared
ATTEMPTS = 2  # an answer that cannot be parsed is requested once more
CHARACTERS = 4  # of a token, about
WIN, TIE, LOSS, UNREADABLE = "win", "tie", "loss", "unreadable"
OUTCOMES = (WIN, TIE, LOSS)
HEADER = ("version", *OUTCOMES, "leaning", "pairs", "unreadable", "dropped")
COLORS = {WIN: "tab:green", TIE: "lightgray", LOSS: "tab:red"}
_EQUAL = re.compile(r"\b(equal|equally|tie|same quality)\b", re.IGNORECASE)
_FORMS = (
    re.compile(r"\(([ABC])\)"),
    re.compile(r"^\W*([ABC])\W*$"),
    re.compile(r"\b(?:response|option|answer)\s*:?\s*([ABC])\b", re.IGNORECASE),
    re.compile(r"^\W*([ABC])(?:[.:,]|\s+is\b)"),
)


class Pair(NamedTuple):
    """The stories of one seed, by a bounded model and by the full one."""

    cell: Cell
    seed: int
    bounded: str
    full: str

    def prompt(self, swapped: bool) -> str:
        """The bounded model's story is response (A), or (B) if swapped."""
        first, second = (self.full, self.bounded) if swapped else (self.bounded, self.full)
        return filled(JUDGE, prompt=STORY, first=first, second=second)


class Pairs(NamedTuple):
    pairs: list[Pair]
    dropped: dict[Cell, int]  # pairs of each version in which nothing was evicted: both stories are the same
    facts: Record  # about the stories

    @property
    def cells(self) -> list[Cell]:
        return list(self.dropped)


def pairs(store: Store) -> Pairs:
    """The newest stories of a store, and those that were generated with the same settings."""
    if not store.records:
        raise FileError("has no stories", store.path, advice="generate some first")
    last = store.records[-1]
    newest = {name: last[name] for name in STORY_KEY}
    versions: dict[Cell, dict[int, Record]] = {}
    for record in [record for record in store.matching(newest) if record.get(SAMPLER) == last.get(SAMPLER)]:
        versions.setdefault(cell_of(record), {})[record["seed"]] = record
    full = versions.pop(FULL_MODEL, {})
    shared = {cell: [seed for seed in sorted(stories) if seed in full] for cell, stories in versions.items()}
    if not any(shared.values()):
        raise FileError(
            "has no story of a bounded model and of the full one by the same seed",
            store.path,
            advice="generate both first",
        )
    kept = {cell: [seed for seed in seeds if evicted(versions[cell][seed])] for cell, seeds in shared.items()}
    matched = [
        Pair(cell, seed, versions[cell][seed]["story"], full[seed]["story"])
        for cell, seeds in kept.items()
        for seed in seeds
    ]
    dropped = {cell: len(shared[cell]) - len(kept[cell]) for cell in shared}
    return Pairs(matched, dropped, {**newest, "model": last.get("model", "")})


def choice(answer: str) -> str | None:
    """A, B or C (equal quality); None where the answer names none, or more than one."""
    for form in _FORMS:
        named: set[str] = {letter.upper() for letter in form.findall(answer.strip())}
        if len(named) == 1:
            return named.pop()
        if named:
            break
    return "C" if _EQUAL.search(answer) else None


def verdict(first: str | None, swapped: str | None) -> str:
    """From the choices where the bounded model's story was (A), and where it was (B). A win needs both."""
    if first is None or swapped is None:
        return UNREADABLE
    return {("A", "B"): WIN, ("B", "A"): LOSS}.get((first, swapped), TIE)


def leaning(first: Sequence[float], swapped: Sequence[float]) -> float:
    """How much likelier the judge prefers the bounded model's story, as a log-ratio over both orders.

    A preference for a letter (A or B) cancels.
    """
    return first[0] - first[1] + swapped[1] - swapped[0]


class Cost(NamedTuple):
    """The requests that are left, if all answers can be parsed; tokens are estimated from characters."""

    requests: int
    read: int
    written: int

    def summary(self, price: tuple[float, float] | None) -> str:
        text = f"{self.requests:,} requests, about {self.read:,} tokens to read and {self.written:,} to write at most"
        if price is None:
            return text
        total = (self.read * price[0] + self.written * price[1]) / 1e6
        return f"{text}: about {total:,.2f} at {price[0]:g} and {price[1]:g} per million"


class RequestLimitError(Exception):
    """All allowed requests were made."""


class Comparison(NamedTuple):
    """A pair in one order."""

    pair: Pair
    swapped: bool

    @property
    def prompt(self) -> str:
        return self.pair.prompt(self.swapped)

    @property
    def key(self) -> str:
        return hashlib.sha256(self.prompt.encode()).hexdigest()[:16]


Verdicts = dict[Cell, list[str]]  # of each version's pairs, by seed


class Judgement(Task[Cell, str, list[Record]]):
    """One judge on pairs of stories. An item is a prompt, by its key; a result is the answers to it.

    most  requests that may be made in all; None: no limit
    """

    unit = "answers"

    def __init__(
        self, judge: Judge, pairs: Pairs, store: Store, most: int | None = None, metadata: Record | None = None
    ) -> None:
        self.key, self.metadata, self.store = judge.key, metadata or {}, store
        self.judge, self.pairs, self.most, self._before = judge, pairs, most, judge.requests
        different = [pair for pair in pairs.pairs if pair.bounded != pair.full]  # the same story is a tie
        self.both = {pair: (Comparison(pair, False), Comparison(pair, True)) for pair in different}
        self.comparisons = {one.key: one for both in self.both.values() for one in both}
        self.answers = self.read(store.done(judge.key))

    @property
    def requests(self) -> int:
        return self.judge.requests - self._before

    def cell_of(self, record: Record) -> Cell:
        return cell_of(record)

    def record_key(self, cell: Cell) -> Record:
        """Without the cell: two versions may have written the same story."""
        return self.key

    def items(self, cell: Cell) -> list[str]:
        return [one.key for pair, both in self.both.items() for one in both if pair.cell == cell]

    def read(self, records: list[Record]) -> dict[str, list[Record]]:
        """A first attempt replaces earlier answers. An endpoint may have the name of a local model."""
        answers: dict[str, list[Record]] = {}
        for record in records:
            if record.get(FINGERPRINT) == self.key.get(FINGERPRINT):
                _add(answers, record)
        return answers

    def complete(self, result: list[Record]) -> bool:
        return len(result) >= ATTEMPTS or _choice(result) is not None

    def work(self, job: Job[Cell, str]) -> int:
        return len(job.items)

    def prepare(self, job: Job[Cell, str], model: Any) -> Compute[str]:
        def compute(keys: list[str], on_tokens: OnTokens) -> Iterator[Record]:
            (key,) = keys
            while self._open(key):
                record = self._ask(key)
                yield record
                _add(self.answers, record)
            on_tokens(1)

        return compute

    def _ask(self, key: str) -> Record:
        comparison, began = self.comparisons[key], perf_counter()
        left = None if self.most is None else self.most - self.requests
        if left == 0:
            raise RequestLimitError
        try:
            answer = self.judge.ask(comparison.prompt, left)
        except EndpointFailedError as error:
            if self.most is not None and self.requests >= self.most:
                raise RequestLimitError from error
            raise
        return {
            "prompt": key,
            **comparison.pair.cell._asdict(),
            "seed": comparison.pair.seed,
            "swapped": comparison.swapped,
            "attempt": len(self.answers.get(key, [])) + 1,
            "answer": answer.text,
            **answer.details,
            "seconds": perf_counter() - began,
        }

    def judge_all(self, progress: Progress | None = None) -> bool:
        """Whether all pairs are judged; False: all allowed requests were made."""
        try:
            Runner(self, self.store, batch=1).run(self.pairs.cells, progress or Progress())
        except RequestLimitError:
            return False
        return True

    def _open(self, key: str) -> bool:
        return not self.complete(self.answers.get(key, []))

    def cost(self) -> Cost:
        prompts = [one.prompt for key, one in self.comparisons.items() if self._open(key)]
        return Cost(len(prompts), sum(len(p) for p in prompts) // CHARACTERS, len(prompts) * ANSWER_TOKENS)

    def done(self) -> tuple[int, int]:
        """How many prompts are answered, of how many."""
        return sum(not self._open(key) for key in self.comparisons), len(self.comparisons)

    def unreadable(self) -> list[str]:
        """The answers, where there are some and none of them can be read."""
        answers = [record["answer"] for key in self.comparisons for record in self.answers.get(key, [])]
        return [] if any(choice(answer) for answer in answers) else answers

    def verdicts(self) -> Verdicts:
        """Of the pairs that are judged."""
        verdicts: Verdicts = {cell: [] for cell in self.pairs.cells}
        for pair in self.pairs.pairs:
            both = self.both.get(pair)
            if both is None:
                verdicts[pair.cell].append(TIE)
            elif not any(self._open(one.key) for one in both):
                verdicts[pair.cell].append(verdict(*(_choice(self.answers[one.key]) for one in both)))
        return verdicts

    def leanings(self) -> dict[Cell, list[float]]:
        """Of the pairs whose judge gave log-likelihoods."""
        leanings: dict[Cell, list[float]] = {cell: [] for cell in self.pairs.cells}
        for pair, both in self.both.items():
            first = [self.answers.get(one.key, [{}])[0] for one in both]
            if all(LIKELIHOODS in record for record in first):
                leanings[pair.cell].append(leaning(*(record[LIKELIHOODS] for record in first)))
        return leanings


def _add(answers: dict[str, list[Record]], record: Record) -> None:
    earlier = [] if record.get("attempt") == 1 else answers.get(record["prompt"], [])
    answers[record["prompt"]] = [*earlier, record]


def _choice(answers: list[Record]) -> str | None:
    choices = (choice(record["answer"]) for record in answers)
    return next((one for one in choices if one is not None), None)


class Line(NamedTuple):
    cell: Cell
    shares: dict[str, Estimate]  # of the pairs that could be judged; empty where there are none
    leaning: Estimate | None  # share of the pairs that lean to the bounded model; None without log-likelihoods
    pairs: int
    unreadable: int
    dropped: int  # nothing was evicted


def report_lines(verdicts: Verdicts, leanings: dict[Cell, list[float]], dropped: dict[Cell, int]) -> list[Line]:
    return [_line(cell, outcomes, leanings[cell], dropped[cell]) for cell, outcomes in verdicts.items()]


def _line(cell: Cell, outcomes: list[str], leanings: list[float], dropped: int) -> Line:
    judged = [one for one in outcomes if one != UNREADABLE]
    shares = {name: _share([one == name for one in judged]) for name in OUTCOMES if judged}
    leaning = _share([one > 0 for one in leanings]) if leanings else None
    return Line(cell, shares, leaning, len(judged), len(outcomes) - len(judged), dropped)


def _share(among: list[bool]) -> Estimate:
    return statistics.mean(among, [1] * len(among))


def table(results: list[Line], title: str) -> Table:
    rows: list[list[Any]] = []
    names = [f"{name}{end}" for name in (*OUTCOMES, "leaning") for end in ("", "_low", "_high")]
    lines: list[list[Any]] = [["policy", "size", *names, "pairs", "unreadable", "dropped"]]
    for line in results:
        means = [*(line.shares.get(name) for name in OUTCOMES), line.leaning]
        shares = [Formatted(mean, "{:.0%}".format) if mean else None for mean in means]
        rows.append([line.cell.label, *shares, *(str(count) for count in line[3:])])
        lines.append([*line.cell, *(value for mean in means for value in mean or [""] * 3), *line[3:]])
    return Table(NAME, f"bounded against full: {title}", "", HEADER, rows, lines)


def markdown(results: list[Line], title: str, facts: dict[str, Any]) -> str:
    about = (
        f"{title}. How often the bounded model's story is better than the full model's of the same seed. Each pair is "
        "shown in both orders; a story that is not preferred in both is a tie. Beside each share its 95 % interval, by "
        "bootstrap over the pairs. Leaning: the share of pairs in which a local judge gives the bounded model's story "
        "the higher likelihood, over both orders together, so that a preference for a letter cancels. Dropped: pairs "
        "in which nothing was evicted."
    )
    return document("Stories before a judge", about, [table(results, title)], facts)


def figure(results: list[Line], folder: Path, title: str) -> None:
    """judge.png and .svg: a stacked bar for each version."""
    judged = [line for line in results if line.shares]
    labels = [line.cell.label for line in judged]
    with saved_figure(folder, NAME, 1, 7.5) as (_, (axes,)):
        left = [0.0] * len(judged)
        for name in OUTCOMES:
            widths = [100 * line.shares[name].value for line in judged]
            bars = axes.barh(labels, widths, left=left, color=COLORS[name], label=name)
            axes.bar_label(bars, [f"{width:.0f}" if width >= 4 else "" for width in widths], label_type="center")
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel("% of the pairs in which something was evicted")
        axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)
        axes.set_title(title, fontsize=10)
