"""The paper's four analyses as tables: what is kept at each step, how recent it is, where it stood, what it was."""

from __future__ import annotations

import numpy

from msrnn.analysis import paper
from msrnn.analysis.study import Study
from msrnn.analysis.tagging import HOW
from msrnn.evaluation.report import Share, Table, Value, code

SEEN = "A step sees a token from the token's own step on, up to and with the step that drops it."
KEPT = (
    "Steps kept: how many steps see a token, its own among them; a token that is never dropped counts to the chunk's "
    "end. Means are over layers, KV heads and chunks."
)


def retention(study: Study) -> Table:
    rows: list[list[Value]] = []
    for one in study.summaries.values():
        times, length = one.shown.evicted_at[-1, 0], one.length
        for step in (length // 4, length // 2, 3 * length // 4, length - 1):
            seen = numpy.flatnonzero((numpy.arange(length) <= step) & (step <= times))
            ages = step - seen
            rows.append([one.policy, one.size, step, len(seen), int(seen[0]), int(numpy.median(ages)), int(ages.max())])
    return Table(
        "retention",
        "Tokens kept at each step, in the last layer",
        f"{SEEN} Of the first chunk, the one in the pictures (head-wise policies: the first KV head). Ages are steps "
        "since a token was read.",
        ["policy", "size", "step", "tokens seen", "oldest", "median age", "greatest age"],
        rows,
    )


def recent(study: Study) -> Table:
    low, high = paper.RECENT
    rows: list[list[Value]] = []
    for policy in study.policies:
        cells = [study.summaries.get((policy, size)) for size in study.sizes]
        rows.append([policy, *(Share(numpy.nanmean(one.recent)) if one else None for one in cells)])
        rows.append([f"{policy}, all steps", *(Share(one.recent_at_all_steps) if one else None for one in cells)])
    if set(study.sizes) & set(paper.SIZES):
        told = f"{low:.0%}–{high:.0%}"  # noqa: RUF001
        rows.append(["tova, the paper's LLaMA-2-7B", *(told if n in paper.SIZES else None for n in study.sizes)])
    return Table(
        "recent",
        "Share of kept states that are recent",
        "Recent: the policy `window` of the same size sees it as well. Averaged over chunks, layers, KV heads and the "
        "steps that see what the policy chose (those after the first drop); then over all steps, those before the "
        "first drop, which see everything, among them. The paper does not spell its measure out.",
        ["policy", *(f"{size:,}" for size in study.sizes)],
        rows,
    )


def recent_by_layer(study: Study) -> Table:
    cells = list(study.summaries.values())
    return Table(
        "recent-by-layer",
        "Share of kept states that are recent, by layer",
        "As above, over the steps that see what the policy chose.",
        ["layer", *(one.label for one in cells)],
        [
            [str(layer), *(Share(one.recent[i].mean()) for one in cells)]
            for i, layer in enumerate(cells[0].layers)
        ],
    )  # fmt: skip


def first_positions(study: Study) -> Table:
    cells = list(study.summaries.values())
    positions = min(paper.POSITIONS, study.length)
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
    known = [(i, size) for i, size in enumerate(paper.SIZES) if size in study.sizes]
    rows: list[list[Value]] = []
    lines: list[list[Value]] = [["tag", "policy", "size", "tokens", "mean", "low", "high", "paper"]]
    for lived in study.by_tag:
        theirs = paper.TAGS.get(lived.name)
        beside: list[Value] = [theirs[i] if theirs else None for i, _ in known]
        rows.append([code(lived.name), lived.tokens, *(estimate.value for estimate in lived.mean.values()), *beside])
        for (policy, size), estimate in lived.mean.items():
            same = theirs[paper.SIZES.index(size)] if theirs and size in paper.SIZES else None
            lines.append([lived.name, policy, size, lived.tokens, *estimate, same])
    absent = [code(name) for name in paper.TAGS if name not in {lived.name for lived in study.by_tag}]
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
