"""A study as files: every table as CSV, all of them in one Markdown file, and a figure for each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from numpy import nanmean

from msrnn.analysis import figures
from msrnn.analysis.study import Study
from msrnn.analysis.summary import Summary
from msrnn.analysis.tables import (
    between_heads,
    between_layers,
    between_policies,
    first_positions,
    lifetimes,
    longest_lived,
    recent,
    recent_by_layer,
    retention,
    tags,
)
from msrnn.evaluation.report import Share, Table, Value, document

Strings = Callable[[int], str]  # the string of a token id


def make_tables(study: Study, strings: Strings) -> list[Table]:
    """All tables that have rows, those of the paper first."""
    tables = [
        retention(study),
        recent(study),
        recent_by_layer(study),
        first_positions(study),
        tags(study),
        lifetimes(study),
        longest_lived(study, strings),
        between_policies(study),
        between_layers(study),
        between_heads(study),
    ]
    return [table for table in tables if table]


def summary(study: Study) -> Table:
    """The few numbers of each policy and size that a terminal shows."""
    return Table(
        "summary",
        "Which tokens stay",
        "Steps kept: how many steps see a token. Recent: of the states kept, the share that a window of the same size "
        "keeps as well.",
        ["policy", "size", "mean steps\nkept", "median\nsteps", "never\ndropped", "recent"],
        [_summarized(one) for one in study.summaries.values()],
    )


def _summarized(one: Summary) -> list[Value]:
    shares = Share(one.held), Share(float(nanmean(one.recent)))
    return [one.policy, one.size, float(one.life.mean()), one.quantile(0.5), *shares]


def write(tables: list[Table], folder: Path, title: str, facts: dict[str, str]) -> None:
    """analysis.md and NAME.csv; below the tables, what they were computed with."""
    (folder / "analysis.md").write_text(document("Which tokens stay", f"{title}.", tables, facts, titles=True))
    for table in tables:
        (folder / f"{table.name}.csv").write_text(table.csv())


def draw(study: Study, folder: Path, title: str, strings: Strings) -> None:
    """NAME.png and NAME.svg, named as the tables; retention has two for each policy and size."""
    for one in study.summaries.values():
        figures.retention(one, folder, f"{title} (the first)")
    figures.recent_by_layer(study, folder, title)
    figures.first_positions(study, folder, title)
    figures.tags(study, folder, title)
    figures.lifetimes(study, folder, title)
    figures.longest_lived(study, folder, title, strings)
    figures.between_policies(study, folder, title)
    figures.between_layers(study, folder, title)
    figures.between_heads(study, folder, title)
