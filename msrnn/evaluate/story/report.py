"""How long stories are, how many of them forgot something, and where they part from those of the full model."""

from __future__ import annotations

import csv
import io
from typing import NamedTuple

from msrnn.evaluate import statistics
from msrnn.evaluate.cells import Cell
from msrnn.evaluate.statistics import Estimate
from msrnn.evaluate.store import Row
from msrnn.evaluate.story.run import Stories, Telling
from msrnn.evaluate.tables import MISSING, markdown_list, markdown_table
from msrnn.policy import FULL

HEADERS = ("version", "tokens", "words", "ended", "forgot", "as full", "parted early")


class Line(NamedTuple):
    """What is told of one version's stories."""

    cell: Cell
    stories: int
    tokens: Estimate
    words: Estimate
    ended: int  # by themselves
    forgot: int  # something was evicted before the end
    same: int  # word for word the full model's
    early: int  # differ from it before anything forgotten could tell: rounding did it


def lines(stories: Stories, telling: Telling) -> list[Line]:
    whole = stories[Cell(FULL, None)]
    return [_line(cell, told, whole, telling) for cell, told in stories.items()]


def _line(cell: Cell, told: list[Row], whole: list[Row], telling: Telling) -> Line:
    parted = [parting(one["ids"], other["ids"]) for one, other in zip(told, whole, strict=True)]
    tokens, words = ([len(story["ids"]) for story in told], [len(story["story"].split()) for story in told])
    count = [1] * len(told)
    limit = telling.most if cell.size is None else telling.free_at(cell.size)
    return Line(
        cell,
        len(told),
        statistics.mean(tokens, count),
        statistics.mean(words, count),
        sum(story["ended"] for story in told),
        sum(forgot(story) for story in told),
        sum(at is None for at in parted),
        sum(at is not None and at < limit for at in parted),
    )


def forgot(story: Row) -> bool:
    """Whether a state had to let something go. The last token of a story that did not end was never read."""
    read = story["prompt_tokens"] + len(story["ids"]) - (0 if story["ended"] else 1)
    return story["size"] is not None and read > story["size"]


def parting(ids: list[int], others: list[int]) -> int | None:
    """The first token at which two stories differ; None: they do not."""
    if ids == others:
        return None
    pairs = enumerate(zip(ids, others, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(ids), len(others)))


def rows(found: list[Line], between: str = "\n") -> list[list[str]]:
    return [
        [
            line.cell.label,
            *(_shown(estimate, between) for estimate in (line.tokens, line.words)),
            *(f"{count} of {line.stories}" for count in (line.ended, line.forgot)),
            *(MISSING if line.cell.size is None else f"{count} of {line.stories}" for count in (line.same, line.early)),
        ]
        for line in found
    ]


def _shown(estimate: Estimate, between: str) -> str:
    value, low, high = (None if x is None else f"{x:,.0f}" for x in estimate)
    return f"{value}" + ("" if low is None else f"{between}{low} to {high}")


def markdown(found: list[Line], title: str, told: dict[str, str]) -> str:
    """The table, and below it what it was computed with."""
    about = f"# Stories\n\n{title}. Mean lengths and their 95 % intervals, by bootstrap over the stories.\n"
    return "\n".join([about, markdown_table(HEADERS, rows(found, " · ")), markdown_list(told)])


def as_csv(found: list[Line]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    names = *("tokens", "tokens_low", "tokens_high", "words", "words_low", "words_high"), "ended", "forgot", "same"
    writer.writerow(["policy", "size", "stories", *names, "early"])
    for line in found:
        writer.writerow([*line.cell, line.stories, *line.tokens, *line.words, *line[4:]])
    return file.getvalue()
