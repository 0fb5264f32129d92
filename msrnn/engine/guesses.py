"""Guesses of the next tokens of an answer, from its own text: what has followed the last tokens before."""

from __future__ import annotations

from collections.abc import Sequence

FEWEST, FIRST = 1, 3  # tokens that are guessed at once; with the one before them, a power of two
LONGEST_PAUSE = 64  # tokens


class Guesser:
    """Finds the last place in a text where its newest tokens stood before, and guesses that the same follows.

    How many tokens it guesses depends on how many of its guesses were right, and on nothing else, so that an answer is
    computed in the same passes every time. After guesses of which none was right it pauses, longer each time. A text
    that is never guessed costs no more than its tokens.
    """

    def __init__(self, tokens: Sequence[int], most: int, known: int = 3) -> None:
        self._tokens, self._most, self._known = [*tokens], most, known
        self._follows: dict[tuple[int, ...], int] = {}  # where the token after these has stood last
        self._indexed = known  # the first token that is not in it yet
        self._count, self._pause, self._silent = min(FIRST, most), 1, 0

    def add(self, token: int) -> None:
        """The next token of the text."""
        self._tokens.append(token)
        self._silent = max(0, self._silent - 1)

    def guess(self, most: int) -> list[int]:
        """The next tokens, at most this many; none where there is no place to take them from."""
        if self._silent:
            return []
        for at in range(self._indexed, len(self._tokens)):
            self._follows[tuple(self._tokens[at - self._known : at])] = at
        self._indexed = max(self._known, len(self._tokens))
        begin = self._follows.get(tuple(self._tokens[-self._known :]))
        return [] if begin is None else self._tokens[begin : begin + min(self._count, most)]

    def learn(self, guessed: int, right: int) -> None:
        """How many of the last guesses were right."""
        if right == 0:
            self._count, self._silent = FEWEST, self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            return
        self._count = 2 * guessed + 1 if right == guessed else max(FEWEST, right)
        self._count, self._pause = min(self._count, self._most), max(1, self._pause // 2)
