"""How often the bounded model wins, ties and loses; and the stacked bars of it."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import NamedTuple

from msrnn.evaluation import statistics
from msrnn.evaluation.cells import Cell
from msrnn.evaluation.figures import drawn
from msrnn.evaluation.judge.run import Verdicts, readable
from msrnn.evaluation.judge.verdict import LOSS, TIE, WIN
from msrnn.evaluation.statistics import Estimate
from msrnn.evaluation.tables import MISSING, estimated, markdown_list, markdown_table

OUTCOMES = (WIN, TIE, LOSS)
HEADERS = ("version", *OUTCOMES, "leaning", "pairs", "unreadable", "dropped")
COLORS = {WIN: "tab:green", TIE: "lightgray", LOSS: "tab:red"}


class Line(NamedTuple):
    cell: Cell
    shares: dict[str, Estimate]  # of the pairs that could be judged; empty where there are none
    leaning: Estimate | None  # share of the pairs, the same ones left out; None where the judge does not tell
    pairs: int
    unreadable: int
    dropped: int  # nothing was forgotten


def lines(verdicts: Verdicts, leanings: dict[Cell, list[float]], dropped: dict[Cell, int]) -> list[Line]:
    return [_line(cell, found, leanings[cell], dropped[cell]) for cell, found in verdicts.items()]


def _line(cell: Cell, found: list[str], leanings: list[float], dropped: int) -> Line:
    judged = readable(found)
    shares = {name: _share([one == name for one in judged]) for name in OUTCOMES if judged}
    leaning = _share([one > 0 for one in leanings]) if leanings else None
    return Line(cell, shares, leaning, len(judged), len(found) - len(judged), dropped)


def _share(among: list[bool]) -> Estimate:
    return statistics.mean(among, [1] * len(among))


def rows(found: list[Line], between: str = "\n") -> list[list[str]]:
    return [
        [
            line.cell.label,
            *(_shown(line.shares.get(name), between) for name in OUTCOMES),
            _shown(line.leaning, between),
            *(str(count) for count in line[3:]),
        ]
        for line in found
    ]


def _shown(share: Estimate | None, between: str) -> str:
    return estimated(share, "{:.0%}".format, between) if share else MISSING


def markdown(found: list[Line], title: str, told: dict[str, str]) -> str:
    """The table, and below it what it was judged with."""
    about = (
        f"# Stories before a judge\n\n{title}. How often the bounded model's story is better than the full model's of "
        "the same seed: each pair is shown in both orders, and what is not preferred in both is a tie. Beside each "
        "share its 95 % interval, by bootstrap over the pairs. Leaning: the share of pairs in which a local judge "
        "finds it likelier that the bounded model's story is the better one, both orders together, so that what speaks "
        "for a letter cancels. Dropped are pairs in which nothing was forgotten.\n"
    )
    return "\n".join([about, markdown_table(HEADERS, rows(found, " · ")), markdown_list(told)])


def as_csv(found: list[Line]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    shares = [f"{name}{end}" for name in (*OUTCOMES, "leaning") for end in ("", "_low", "_high")]
    writer.writerow(["policy", "size", *shares, "pairs", "unreadable", "dropped"])
    for line in found:
        means = [*(line.shares.get(name) for name in OUTCOMES), line.leaning]
        writer.writerow([*line.cell, *(value for mean in means for value in mean or [""] * 3), *line[3:]])
    return file.getvalue()


def figure(found: list[Line], folder: Path, title: str) -> None:
    """As judge.png and judge.svg: a bar for each version."""
    judged = [line for line in found if line.shares]
    labels = [line.cell.label for line in judged]
    with drawn(folder, "judge", 1, 7.5) as (_, (axes,)):
        left = [0.0] * len(judged)
        for name in OUTCOMES:
            widths = [100 * line.shares[name].value for line in judged]
            bars = axes.barh(labels, widths, left=left, color=COLORS[name], label=name)
            axes.bar_label(bars, [f"{width:.0f}" if width >= 4 else "" for width in widths], label_type="center")
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel("% of the pairs in which something was forgotten")
        axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)
        axes.set_title(title, fontsize=10)
