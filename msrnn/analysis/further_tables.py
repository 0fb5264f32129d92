"""Beyond the paper: distributions, the longest-lived tokens, and who agrees with whom."""

from __future__ import annotations

from collections.abc import Callable

import numpy

from msrnn.analysis.paper_tables import KEPT
from msrnn.analysis.study import Cell, Study
from msrnn.analysis.summary import QUANTILES, Summary
from msrnn.evaluation.report import Share, Table, Value, code

OFTEN, LONGEST = 10, 20  # occurrences that make a mean, and how many tokens are listed

OVERLAP = (
    "Overlap: of the states that two see, the share that both see, over the steps that see what a policy chose "
    "(those after the first drop)."
)


def lifetimes(study: Study) -> Table:
    return Table(
        "lifetimes",
        "How long states are kept",
        f"{KEPT} Quantiles are over states: a token in one layer and KV head. The picture shows the share that is kept "
        "for so many steps or more, of those born early enough to be.",
        ["policy", "size", "mean", *(f"{share:.0%}" for share in QUANTILES), "never dropped"],
        [
            [one.policy, one.size, float(one.life.mean()), *(one.quantile(q) for q in QUANTILES), Share(one.held)]
            for one in study.summaries.values()
        ],
    )


def longest(study: Study, cell: Cell) -> list[tuple[int, int, float]]:
    """Of the tokens that occur often, those kept longest: id, occurrences, mean steps kept."""
    found = [(token, count, means[cell]) for token, count, means in study.by_token(OFTEN)]
    return sorted(found, key=lambda row: -row[2])[:LONGEST]


def longest_lived(study: Study, strings: Callable[[int], str]) -> Table | None:
    rows: list[list[Value]] = [
        [*cell, code(repr(strings(token))), count, steps]
        for cell in study.summaries
        for token, count, steps in longest(study, cell)
    ]
    if not rows:
        return None
    return Table(
        "longest-lived",
        "The longest-lived tokens",
        f"{KEPT} Of the tokens that occur {OFTEN} times or more, the {LONGEST} that are kept longest.",
        ["policy", "size", "token", "times", "mean steps kept"],
        rows,
    )


def between_policies(study: Study) -> Table | None:
    pairs = dict.fromkeys((one, other) for one, other, _ in study.agreements)
    if not pairs:
        return None
    shares = {key: Share(value) for key, value in study.agreements.items()}
    return Table(
        "policies",
        "Agreement between policies",
        f"{OVERLAP} Between the same layers at the same size; a policy of one group is compared with each head of "
        "another.",
        ["policies", *(f"{size:,}" for size in study.sizes)],
        [[f"{one} and {other}", *(shares.get((one, other, n)) for n in study.sizes)] for one, other in pairs],
    )


def between_layers(study: Study) -> Table | None:
    cells = list(study.summaries.values())
    if len(cells[0].layers) < 2:
        return None
    rows: list[list[Value]] = []
    for i, layer in enumerate(cells[0].layers):
        row: list[Value] = [str(layer)]
        for one in cells:
            square = one.between_layers
            row += [Share(square[i, i + 1]) if i + 1 < len(square) else None, Share(numpy.delete(square[i], i).mean())]
        rows.append(row)
    return Table(
        "layers",
        "Agreement between layers",
        f"{OVERLAP} With the next layer, and the mean with all others; head-wise policies: between heads of one "
        "number.",
        ["layer", *(f"{one.label}, {which}" for one in cells for which in ("next", "others"))],
        rows,
    )


def between_heads(study: Study) -> Table | None:
    cells = headwise(study)
    if not cells:
        return None
    rows: list[list[Value]] = []
    for i, layer in enumerate(cells[0].layers):
        row: list[Value] = [str(layer)]
        for one in cells:
            low, high = one.recent[i].min(), one.recent[i].max()
            row += [Share(one.between_heads[i].mean()), f"{low:.1%}–{high:.1%}"]  # noqa: RUF001
        rows.append(row)
    lines: list[list[Value]] = [["policy", "size", "layer", "head", "overlap with the others", "recent"]]
    for one in cells:
        for i, layer in enumerate(one.layers):
            for head in range(one.heads):
                shares = (Share(one.between_heads[i, head]), Share(one.recent[i, head]))
                lines.append([one.policy, one.size, layer, head, *shares])
    return Table(
        "heads",
        "Differences between heads",
        f"{OVERLAP} The mean over pairs of KV heads of a layer; and the share of recent states, from the head with the "
        "least to the head with the most. The CSV has each head.",
        ["layer", *(f"{one.label}, {which}" for one in cells for which in ("overlap", "recent"))],
        rows,
        lines,
    )


def headwise(study: Study) -> list[Summary]:
    return [one for one in study.summaries.values() if one.heads > 1]
