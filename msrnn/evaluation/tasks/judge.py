"""A judge compares each story of a bounded model with the full model's of the same seed, in both orders."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any, NamedTuple

from msrnn.evaluation.cells import Cell, cell_of
from msrnn.evaluation.runner import Progress, Runner
from msrnn.evaluation.schemas import Schema, Text, check_of
from msrnn.evaluation.store import Record, Store
from msrnn.evaluation.task import Compute, Job, OnTokens, Task
from msrnn.evaluation.tasks.judge_models import ANSWER_TOKENS, FINGERPRINT, LIKELIHOODS, EndpointFailedError, Judge
from msrnn.evaluation.tasks.story_pairs import Comparison, Pairs
from msrnn.evaluation.tasks.verdicts import TIE, Verdicts, choice, leaning, verdict

ATTEMPTS = 2  # an answer that cannot be parsed is requested once more
CHARACTERS = 4  # of a token, about


class JudgementSchema(Schema):
    judge: Text
    prompt: Text
    answer: Text


CHECK = check_of(JudgementSchema)


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
        self.answers = self.read(store.find_done(judge.key))

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

    def count_done(self) -> tuple[int, int]:
        """How many prompts are answered, of how many."""
        return sum(not self._open(key) for key in self.comparisons), len(self.comparisons)

    @property
    def records(self) -> list[Record]:
        """The answers to these pairs, by prompt."""
        return [record for key in self.comparisons for record in self.answers.get(key, [])]

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
