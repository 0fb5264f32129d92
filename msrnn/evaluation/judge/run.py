"""All pairs before a judge, each answer a row of a store: an interrupted judgement goes on, and pays nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from msrnn.evaluation.cells import Cell
from msrnn.evaluation.judge.endpoint import ANSWER, Answer
from msrnn.evaluation.judge.pairs import Pair, Pairs, fingerprint
from msrnn.evaluation.judge.verdict import LIKELIHOODS, TIE, UNREADABLE, choice, leaning, verdict
from msrnn.evaluation.rows import fields, text
from msrnn.evaluation.store import Row, Store

FINGERPRINT = "judge_fingerprint"  # of a local judge; an endpoint has none
CHECK = fields(judge=text, prompt=text, answer=text)
ATTEMPTS = 2  # an unreadable answer is asked for once more
LETTERS = 4  # of a token, about

Verdicts = dict[Cell, list[str]]  # of each version's pairs, in the order of their seeds


class Judge(Protocol):
    name: str
    key: dict[str, Any]
    device: str  # of this machine, that it works on

    def ask(self, prompt: str, on_request: Callable[[], None]) -> Answer: ...


class Cost(NamedTuple):
    """What is left to ask, if all answers can be read; tokens are guessed from letters."""

    requests: int
    read: int
    written: int

    def told(self, price: tuple[float, float] | None) -> str:
        text = f"{self.requests:,} requests, about {self.read:,} tokens to read and {self.written:,} to write at most"
        if price is None:
            return text
        total = (self.read * price[0] + self.written * price[1]) / 1e6
        return f"{text}: about {total:,.2f} at {price[0]:g} and {price[1]:g} per million"


class EnoughError(Exception):
    """As many requests as were allowed."""


class Court:
    """One judge on pairs of stories; asks at most so many times."""

    def __init__(
        self, judge: Judge, pairs: Pairs, store: Store, most: int | None = None, beside: dict[str, Any] | None = None
    ) -> None:
        self.judge, self.pairs, self.store, self.most, self.beside = judge, pairs, store, most, beside or {}
        self.requests = 0
        self._answers: dict[str, list[Row]] = {}
        for row in store.done(judge.key):
            if row.get(FINGERPRINT) == judge.key.get(FINGERPRINT):  # an endpoint may have a local model's name
                self._take(row)

    def _take(self, row: Row) -> None:
        """A first attempt replaces what was answered before it."""
        if row.get("attempt") == 1:
            self._answers[row["prompt"]] = []
        self._answers.setdefault(row["prompt"], []).append(row)

    def cost(self) -> Cost:
        prompts = {p for pair in self._asked for p in self._prompts(pair) if self._open(p)}
        return Cost(len(prompts), sum(len(p) for p in prompts) // LETTERS, len(prompts) * ANSWER)

    def judge_all(self, on_pair: Callable[[Pair], object] = lambda _: None) -> bool:
        """False where there were more questions than requests."""
        try:
            for pair in self._asked:
                for swapped, prompt in enumerate(self._prompts(pair)):
                    while self._open(prompt):
                        self._ask(pair, bool(swapped), prompt)
                on_pair(pair)
        except EnoughError:
            return False
        return True

    def unreadable(self) -> list[str]:
        """The answers, where there are some and none of them can be read."""
        answers = [row["answer"] for rows in self._asked_answers() for row in rows]
        return [] if any(choice(answer) for answer in answers) else answers

    def done(self) -> tuple[int, int]:
        """How many prompts are answered, of how many."""
        prompts = {prompt for pair in self._asked for prompt in self._prompts(pair)}
        return sum(not self._open(prompt) for prompt in prompts), len(prompts)

    def _asked_answers(self) -> list[list[Row]]:
        prompts = dict.fromkeys(fingerprint(prompt) for pair in self._asked for prompt in self._prompts(pair))
        return [self._answers.get(prompt, []) for prompt in prompts]

    def verdicts(self) -> Verdicts:
        """Of the pairs that were judged."""
        found: Verdicts = {cell: [] for cell in self.pairs.cells}
        for pair in self.pairs.pairs:
            if pair.bounded == pair.full:
                found[pair.cell].append(TIE)
            elif not any(self._open(prompt) for prompt in self._prompts(pair)):
                first, swapped = (self._choice(prompt) for prompt in self._prompts(pair))
                found[pair.cell].append(verdict(first, swapped))
        return found

    def leanings(self) -> dict[Cell, list[float]]:
        """Of the pairs that were judged by someone who tells how likely each answer was."""
        found: dict[Cell, list[float]] = {cell: [] for cell in self.pairs.cells}
        for pair in self._asked:
            told = [self._answers.get(fingerprint(prompt), [{}])[0] for prompt in self._prompts(pair)]
            if all(LIKELIHOODS in row for row in told):
                found[pair.cell].append(leaning(*(row[LIKELIHOODS] for row in told)))
        return found

    @property
    def _asked(self) -> list[Pair]:
        """Stories that are the same are equally good, whoever judges."""
        return [pair for pair in self.pairs.pairs if pair.bounded != pair.full]

    @staticmethod
    def _prompts(pair: Pair) -> list[str]:
        return [pair.prompt(swapped) for swapped in (False, True)]

    def _open(self, prompt: str) -> bool:
        """Whether there is still something to ask."""
        answers = self._answers.get(fingerprint(prompt), [])
        return len(answers) < ATTEMPTS and self._choice(prompt) is None

    def _choice(self, prompt: str) -> str | None:
        found = (choice(row["answer"]) for row in self._answers.get(fingerprint(prompt), []))
        return next((one for one in found if one is not None), None)

    def _ask(self, pair: Pair, swapped: bool, prompt: str) -> None:
        began = perf_counter()
        answer = self.judge.ask(prompt, self._request)
        row = {
            **self.judge.key,
            "prompt": fingerprint(prompt),
            **pair.cell._asdict(),
            "seed": pair.seed,
            "swapped": swapped,
            "attempt": len(self._answers.get(fingerprint(prompt), [])) + 1,
            "answer": answer.text,
            **answer.told,
            "seconds": perf_counter() - began,
            **self.beside,
        }
        self.store.append(row)
        self._take(row)

    def _request(self) -> None:
        if self.most is not None and self.requests >= self.most:
            raise EnoughError
        self.requests += 1


def readable(verdicts: list[str]) -> list[str]:
    return [one for one in verdicts if one != UNREADABLE]
