"""Finds the line breaks of a hard-wrapped text, which the page shows as spaces: the text flows as paragraphs.

A line was wrapped at column W when it fits W and the next line's first word would not have fitted behind it. Each
break so allows a range of columns; the column that most breaks allow is the text's, if nearly all of them agree. Verse,
code and lists do not: they break where the next word would have fitted.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

NARROWEST, WIDEST = 50, 130  # columns a text is wrapped at
FEWEST, AGREEING = 3, 2 / 3  # breaks that a column must explain: their number, and their share of all
SLACK = 0.9  # a line that ends this close to the column was wrapped as well: editors change words
LONGEST_WORD = 30
_OWN_LINE = re.compile(r"\s|[-*+•>#|]|\d+[.)]\s")  # indented, or an item of a list, a quote, a heading, a table


class Break(NamedTuple):
    """The line feed between two lines that are not blank."""

    at: int  # in characters
    width: int  # of the line before it
    needed: int  # width of the line with the next word on it


def wrapped(tokens: Sequence[str]) -> list[int]:
    """Indices of the tokens whose line feed only wraps a paragraph."""
    breaks = list(_breaks("".join(tokens)))
    column = _column(breaks)
    if column is None:
        return []
    ends = list(accumulate(map(len, tokens)))
    found = (bisect_right(ends, one.at) for one in breaks if one.needed > SLACK * column)
    # A token with more than one line feed ends a paragraph as well.
    return [token for token in found if tokens[token].count("\n") == 1]


def _breaks(text: str) -> Iterator[Break]:
    """Those that may be wraps: the next line begins with a word."""
    lines, at = text.split("\n"), -1
    for line, following in pairwise(lines):
        at += len(line) + 1
        if not line.strip() or not following.strip() or _OWN_LINE.match(following):
            continue
        width, word = len(line.rstrip()), len(following.split(maxsplit=1)[0])
        if word <= LONGEST_WORD:
            yield Break(at, width, width + 1 + word)


def _column(breaks: list[Break]) -> int | None:
    """The column at which the text is wrapped; None: it is not."""
    votes: Counter[int] = Counter()
    for one in breaks:
        votes.update(range(max(one.width, NARROWEST), min(one.needed, WIDEST + 1)))
    if not votes:
        return None
    column, count = votes.most_common(1)[0]
    return column if count >= max(FEWEST, AGREEING * len(breaks)) else None
