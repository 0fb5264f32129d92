"""Guesses of the next tokens of an answer, from its own text: what has followed the last tokens before."""

from __future__ import annotations

from collections.abc import Sequence

FEWEST, FIRST = 2, 4  # tokens that are guessed at once
LONGEST_PAUSE = 64  # tokens


class Guesser:
    """Finds the last place in a text where its newest tokens stood before, and guesses that the same follows.

    How many tokens it guesses depends on how many of its guesses were right, and on nothing else, so that an answer is
    computed in the same passes every time. After guesses of which none was right it pauses, longer each time.
    """

    def __init__(self, tokens: Sequence[int], most: int, known: int = 3) -> None:
        self._tokens, self._most, self._known = list[int](), most, known
        self._follows: dict[tuple[int, ...], int] = {}  # where the token after these has stood last
        self._count, self._pause, self._silent = min(FIRST, most), 1, 0
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """The next token of the text."""
        if len(self._tokens) >= self._known:
            self._follows[tuple(self._tokens[-self._known :])] = len(self._tokens)
        self._tokens.append(token)
        self._silent = max(0, self._silent - 1)

    def guess(self, most: int) -> list[int]:
        """The next tokens, at most this many; none where there is no place to take them from."""
        begin = self._follows.get(tuple(self._tokens[-self._known :]))
        if self._silent or begin is None:
            return []
        return self._tokens[begin : begin + min(self._count, most)]

    def learn(self, guessed: int, right: int) -> None:
        """How many of the last guesses were right."""
        if right == 0:
            self._count, self._silent = FEWEST, self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            return
        self._count = 2 * guessed if right == guessed else max(FEWEST, right)
        self._count, self._pause = min(self._count, self._most), max(1, self._pause // 2)
