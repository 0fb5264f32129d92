"""How long stories are, how often they repeat themselves, how many forgot something or are the full model's."""

from __future__ import annotations

import csv
import io
from typing import NamedTuple

from msrnn.evaluation import statistics
from msrnn.evaluation.cells import Cell
from msrnn.evaluation.statistics import Estimate
from msrnn.evaluation.store import Row
from msrnn.evaluation.story.run import FULL_MODEL, Stories
from msrnn.evaluation.tables import estimated, markdown_list, markdown_table

HEADERS = ("version", "tokens", "words", "said before", "ended", "forgot", "as full")
RUN = 4  # words that are the same in the same order: a story repeats itself


class Line(NamedTuple):
    """What is told of one version's stories."""

    cell: Cell
    stories: int
    tokens: Estimate
    words: Estimate
    repeated: Estimate
    ended: int  # by themselves
    forgot: int  # something was evicted before the end
    same: int  # word for word the full model's


def lines(stories: Stories) -> list[Line]:
    whole = stories[FULL_MODEL]
    return [_line(cell, told, whole) for cell, told in stories.items()]


def _line(cell: Cell, told: list[Row], whole: list[Row]) -> Line:
    count = [1] * len(told)
    return Line(
        cell,
        len(told),
        statistics.mean([len(story["ids"]) for story in told], count),
        statistics.mean([len(story["story"].split()) for story in told], count),
        statistics.mean([repeated(story["story"]) for story in told], count),
        sum(story["ended"] for story in told),
        sum(forgot(story) for story in told),
        sum(one["ids"] == other["ids"] for one, other in zip(told, whole, strict=True)),
    )


def forgot(story: Row) -> bool:
    """Whether a state had to let something go. The last token of a story that did not end was never read."""
    read = story["prompt_tokens"] + len(story["ids"]) - (0 if story["ended"] else 1)
    return story["size"] is not None and read > story["size"]


def repeated(story: str) -> float:
    """Of all runs of four words, the share that the story has told before."""
    words = story.lower().split()
    runs = list(zip(*(words[i:] for i in range(RUN)), strict=False))
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def rows(found: list[Line], between: str = "\n") -> list[list[str]]:
    return [
        [
            line.cell.label,
            *(estimated(estimate, "{:,.0f}".format, between) for estimate in (line.tokens, line.words)),
            estimated(line.repeated, "{:.1%}".format, between),
            *(f"{count} of {line.stories}" for count in (line.ended, line.forgot, line.same)),
        ]
        for line in found
    ]


def markdown(found: list[Line], title: str, told: dict[str, str]) -> str:
    """The table, and below it what it was computed with."""
    about = (
        f"# Stories\n\n{title}. Means and their 95 % intervals, by bootstrap over the stories. Said before: of all "
        "runs of four words, those that the story has told already.\n"
    )
    return "\n".join([about, markdown_table(HEADERS, rows(found, " · ")), markdown_list(told)])


def as_csv(found: list[Line]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    means = [f"{name}{end}" for name in ("tokens", "words", "repeated") for end in ("", "_low", "_high")]
    writer.writerow(["policy", "size", "stories", *means, "ended", "forgot", "same"])
    for line in found:
        writer.writerow([*line.cell, line.stories, *line.tokens, *line.words, *line.repeated, *line[5:]])
    return file.getvalue()
