"""The tables of a study: the paper's four analyses first, then lifetimes, the longest-lived tokens and agreements.

`write_tables` makes a CSV file of each, and one Markdown file of all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy

from msrnn.analysis.study import PAPER_POSITIONS, PAPER_RECENT, PAPER_SIZES, PAPER_TAGS, Cell, Study
from msrnn.analysis.summary import QUANTILES, Summary
from msrnn.analysis.tagging import HOW
from msrnn.evaluation.report import Share, Table, Value, code, document

SEEN = "A step sees a token from the token's own step on, up to and including the step that evicts it."
KEPT = (
    "Steps kept: how many steps see a token, including its own; a token that is never evicted counts to the chunk's "
    "end. Means are over layers, KV heads and chunks."
)
Strings = Callable[[int], str]  # the string of a token id

OFTEN, LONGEST = 10, 20  # the fewest occurrences of a token that is listed, and the number of tokens listed

OVERLAP = (
    "Overlap: of the KV rows that two see, the share that both see, over the steps that see what a policy chose "
    "(those after the first eviction)."
)


def retention(study: Study) -> Table:
    rows: list[list[Value]] = []
    for one in study.summaries.values():
        times, length = one.first_trace.evicted_at[-1, 0], one.length
        for step in (length // 4, length // 2, 3 * length // 4, length - 1):
            seen = numpy.flatnonzero((numpy.arange(length) <= step) & (step <= times))
            ages = step - seen
            rows.append([one.policy, one.size, step, len(seen), int(seen[0]), int(numpy.median(ages)), int(ages.max())])
    return Table(
        "retention",
        "Tokens kept at each step, in the last layer",
        f"{SEEN} Of the first chunk, the one in the pictures (policies per head: the first KV head). Ages are steps "
        "since a token was read.",
        ["policy", "size", "step", "tokens seen", "oldest", "median age", "greatest age"],
        rows,
    )


def recent(study: Study) -> Table:
    low, high = PAPER_RECENT
    rows: list[list[Value]] = []
    for policy in study.policies:
        cells = [study.summaries.get((policy, size)) for size in study.sizes]
        rows.append([policy, *(Share(numpy.nanmean(one.recent)) if one else None for one in cells)])
        rows.append([f"{policy}, all steps", *(Share(one.recent_at_all_steps) if one else None for one in cells)])
    if set(study.sizes) & set(PAPER_SIZES):
        range_ = f"{low:.0%}–{high:.0%}"  # noqa: RUF001
        rows.append(["tova, the paper's LLaMA-2-7B", *(range_ if n in PAPER_SIZES else None for n in study.sizes)])
    return Table(
        "recent",
        "Share of kept KV rows that are recent",
        "Recent: the policy `window` of the same size sees it as well. Averaged over chunks, layers, KV heads and the "
        "steps that see what the policy chose (those after the first eviction); then over all steps, including those "
        "before the first eviction, which see everything. The paper does not define its measure.",
        ["policy", *(f"{size:,}" for size in study.sizes)],
        rows,
    )


def recent_by_layer(study: Study) -> Table:
    cells = list(study.summaries.values())
    return Table(
        "recent-by-layer",
        "Share of kept KV rows that are recent, by layer",
        "As above, over the steps that see what the policy chose.",
        ["layer", *(one.label for one in cells)],
        [
            [str(layer), *(Share(one.recent[i].mean()) for one in cells)]
            for i, layer in enumerate(cells[0].layers)
        ],
    )  # fmt: skip


def first_positions(study: Study) -> Table:
    cells = list(study.summaries.values())
    positions = min(PAPER_POSITIONS, study.length)
    return Table(
        "first-positions",
        f"Mean steps kept of the first {positions} positions",
        KEPT,
        ["position", *(one.label for one in cells)],
        [[str(i), *(float(one.first(positions)[i]) for one in cells)] for i in range(positions)],
    )


def tags(study: Study) -> Table | None:
    if not study.by_tag:
        return None
    known = [(i, size) for i, size in enumerate(PAPER_SIZES) if size in study.sizes]
    rows: list[list[Value]] = []
    lines: list[list[Value]] = [["tag", "policy", "size", "tokens", "mean", "low", "high", "paper"]]
    for lived in study.by_tag:
        theirs = PAPER_TAGS.get(lived.name)
        beside: list[Value] = [theirs[i] if theirs else None for i, _ in known]
        rows.append([code(lived.name), lived.tokens, *(estimate.value for estimate in lived.mean.values()), *beside])
        for (policy, size), estimate in lived.mean.items():
            same = theirs[PAPER_SIZES.index(size)] if theirs and size in PAPER_SIZES else None
            lines.append([lived.name, policy, size, lived.tokens, *estimate, same])
    absent = [code(name) for name in PAPER_TAGS if name not in {lived.name for lived in study.by_tag}]
    missing = f" Of the paper's tags, none of these here: {', '.join(absent)}." if known and absent else ""
    return Table(
        "tags",
        "Mean steps kept by part of speech",
        f"{KEPT} Tags: {HOW} The row `all` follows from the size and the length alone. The paper's figures are of TOVA "
        f"on LLaMA-2-7B in chunks of 4,096 tokens.{missing} The CSV has 95 % intervals, by bootstrap over the chunks.",
        ["tag", "tokens", *(one.label for one in study.summaries.values()), *(f"paper {size:,}" for _, size in known)],
        rows,
        lines,
    )


def lifetimes(study: Study) -> Table:
    return Table(
        "lifetimes",
        "How long KV rows are kept",
        f"{KEPT} Quantiles are over KV rows: a token in one layer and KV head. The picture shows the share of "
        "rows that are kept for a number of steps, among those that are old enough.",
        ["policy", "size", "mean", *(f"{share:.0%}" for share in QUANTILES), "never dropped"],
        [
            [one.policy, one.size, float(one.life.mean()), *(one.quantile(q) for q in QUANTILES), Share(one.held)]
            for one in study.summaries.values()
        ],
    )


def longest(study: Study, cell: Cell) -> list[tuple[int, int, float]]:
    """Of the tokens that occur often, those kept longest: id, occurrences, mean steps kept."""
    candidates = [(token, count, means[cell]) for token, count, means in study.by_token(OFTEN)]
    return sorted(candidates, key=lambda row: -row[2])[:LONGEST]


def longest_lived(study: Study, strings: Strings) -> Table | None:
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
        f"{OVERLAP} With the next layer, and the mean with all others; policies per head: between heads of the "
        "same index.",
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
        f"{OVERLAP} The mean over pairs of KV heads of a layer; and the share of recent rows, from the head with the "
        "least to the head with the most. The CSV has each head.",
        ["layer", *(f"{one.label}, {which}" for one in cells for which in ("overlap", "recent"))],
        rows,
        lines,
    )


def headwise(study: Study) -> list[Summary]:
    return [one for one in study.summaries.values() if one.heads > 1]


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


def summary_table(study: Study) -> Table:
    """The few numbers of each policy and size that a terminal shows."""
    return Table(
        "summary",
        "Which tokens stay",
        "Steps kept: how many steps see a token. Recent: of the KV rows kept, the share that a window of the same size "
        "keeps as well.",
        ["policy", "size", "mean steps\nkept", "median\nsteps", "never\ndropped", "recent"],
        [_summary_values(one) for one in study.summaries.values()],
    )


def _summary_values(one: Summary) -> list[Value]:
    shares = Share(one.held), Share(float(numpy.nanmean(one.recent)))
    return [one.policy, one.size, float(one.life.mean()), one.quantile(0.5), *shares]


def write_tables(tables: list[Table], folder: Path, title: str, facts: dict[str, str]) -> None:
    """analysis.md and NAME.csv; below the tables, what they were computed with."""
    (folder / "analysis.md").write_text(document("Which tokens stay", f"{title}.", tables, facts, titles=True))
    for table in tables:
        (folder / f"{table.name}.csv").write_text(table.csv())
