"""Table and figure of a judge's verdicts: how often a bounded model's story wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from msrnn.evaluation import statistics
from msrnn.evaluation.cells import Cell
from msrnn.evaluation.report import Formatted, Table, document, save_figure
from msrnn.evaluation.statistics import Estimate
from msrnn.evaluation.tasks.verdicts import LOSS, OUTCOMES, TIE, UNREADABLE, WIN, Verdicts

NAME = "judge"
HEADER = ("version", *OUTCOMES, "leaning", "pairs", "unreadable", "dropped")
COLORS = {WIN: "tab:green", TIE: "lightgray", LOSS: "tab:red"}


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
    with save_figure(folder, NAME, 1, 7.5) as (_, (axes,)):
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
