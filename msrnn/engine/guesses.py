"""Guesses of the next tokens of an answer, from its own text: what has followed the last tokens before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

FEWEST, FIRST = 1, 3  # tokens that are guessed at once; with the one before them, a power of two
LONGEST_PAUSE = 64  # tokens


class Guesser(Protocol):
    """Guesses the next tokens of one text."""

    def add(self, token: int) -> None:
        """The next token of the text."""
        ...

    def guess(self, most: int) -> list[int]:
        """The next tokens, at most this many; none where nothing is guessed."""
        ...

    def learn(self, guessed: int, right: int) -> None:
        """How many of the last guesses were right."""
        ...


class Pace:
    """How many tokens are guessed at once.

    It depends on how many guesses were right, and on nothing else, so that an answer is computed in the same passes
    every time. After guesses of which none was right there is a pause, longer each time. A text that is never guessed
    costs no more than its tokens.
    """

    def __init__(self, most: int) -> None:
        self._most, self._pause, self._silent = most, 1, 0
        self.count = min(FIRST, most)

    @property
    def pauses(self) -> bool:
        return self._silent > 0

    def add(self) -> None:
        """The text has one more token."""
        self._silent = max(0, self._silent - 1)

    def learn(self, guessed: int, right: int) -> None:
        if right == 0:
            self.count, self._silent = FEWEST, self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            return
        self.count = 2 * guessed + 1 if right == guessed else max(FEWEST, right)
        self.count, self._pause = min(self.count, self._most), max(1, self._pause // 2)


class TextGuesser:
    """Finds the last place in a text where its newest tokens stood before, and guesses that the same follows."""

    def __init__(self, tokens: Sequence[int], most: int, known: int = 3) -> None:
        self._tokens, self._known, self._pace = [*tokens], known, Pace(most)
        self._follows: dict[tuple[int, ...], int] = {}  # where the token after these has stood last
        self._indexed = known  # the first token that is not in it yet

    def add(self, token: int) -> None:
        self._tokens.append(token)
        self._pace.add()

    def guess(self, most: int) -> list[int]:
        if self._pace.pauses:
            return []
        for at in range(self._indexed, len(self._tokens)):
            self._follows[tuple(self._tokens[at - self._known : at])] = at
        self._indexed = max(self._known, len(self._tokens))
        begin = self._follows.get(tuple(self._tokens[-self._known :]))
        return [] if begin is None else self._tokens[begin : begin + min(self._pace.count, most)]

    def learn(self, guessed: int, right: int) -> None:
        self._pace.learn(guessed, right)


class FirstGuesser:
    """The guesses of the first of several guessers that has any; only that one learns from them."""

    def __init__(self, *guessers: Guesser) -> None:
        self._guessers, self._last = guessers, guessers[0]

    def add(self, token: int) -> None:
        for guesser in self._guessers:
            guesser.add(token)

    def guess(self, most: int) -> list[int]:
        for guesser in self._guessers:
            if guesses := guesser.guess(most):
                self._last = guesser
                return guesses
        return []

    def learn(self, guessed: int, right: int) -> None:
        self._last.learn(guessed, right)
