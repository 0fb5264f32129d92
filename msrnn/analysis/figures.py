"""The figures of a study, one for each table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy

from msrnn.analysis.study import ALL, PAPER_POLICY, PAPER_POSITIONS, PAPER_RECENT, PAPER_SIZES, PAPER_TAGS, Study
from msrnn.analysis.summary import Summary, coverage
from msrnn.analysis.tables import Strings, headwise, longest
from msrnn.evaluation.report import save_figure

COLOURS, INK = ("#fffefb", "#fee8ae", "#fba450", "#e9633f", "#9c2c13"), "#4a3b32"
MAP_PIXELS, SMALL_MAP_PIXELS, MAPS_IN_A_ROW = 768, 192, 6


def draw_figures(study: Study, folder: Path, title: str, strings: Strings) -> None:
    """NAME.png and NAME.svg, named as the tables; retention has two for each policy and size."""
    for one in study.summaries.values():
        retention(one, folder, f"{title} (the first)")
    recent_by_layer(study, folder, title)
    first_positions(study, folder, title)
    tags(study, folder, title)
    lifetimes(study, folder, title)
    longest_lived(study, folder, title, strings)
    between_policies(study, folder, title)
    between_layers(study, folder, title)
    between_heads(study, folder, title)


def retention(one: Summary, folder: Path, title: str) -> None:
    """Maps of steps and tokens: the last layer, and all layers; for policies per head, the first KV head."""
    with save_figure(folder, f"retention-{one.policy}-{one.size}", 1, 6, height=5.6) as (whole, (axes,)):
        _map(axes, one, -1, MAP_PIXELS)
        _label(axes, f"{one.label}, layer {one.layers[-1]}", "token attended to", "step")
        whole.suptitle(title, fontsize=8)
    columns = min(MAPS_IN_A_ROW, len(one.layers))
    rows = -(-len(one.layers) // columns)
    size = (1.7 * columns + 0.3, 1.85 * rows + 0.6)
    name = f"retention-layers-{one.policy}-{one.size}"
    with save_figure(folder, name, columns, size[0], rows, size[1]) as (whole, sheet):
        for axes in sheet:
            axes.set_axis_off()
        for i, axes in enumerate(sheet[: len(one.layers)]):
            _map(axes, one, i, SMALL_MAP_PIXELS)
            axes.set_title(f"layer {one.layers[i]}", fontsize=7, pad=2)
        whole.suptitle(f"{one.label}, all layers: steps down, tokens across; {title}", fontsize=9)


def _map(axes: Any, one: Summary, layer: int, pixels: int) -> None:
    seen = coverage(one.first_trace.evicted_at[layer, 0], pixels)
    extent = (0, one.length, one.length, 0)
    axes.imshow(seen**0.6, cmap=_colormap(), vmin=0, vmax=1.2, extent=extent, interpolation="nearest", aspect="equal")


def recent_by_layer(study: Study, folder: Path, title: str) -> None:
    """The share of kept KV rows that are recent, by layer, with the paper's range."""
    policies = study.policies
    with save_figure(folder, "recent-by-layer", len(policies), 1.2 + 4 * len(policies)) as (whole, panels):
        for axes, policy in zip(panels, policies, strict=True):
            for size in study.sizes_of(policy):
                one = study.summaries[policy, size]
                axes.plot(one.layers, one.recent.mean(-1), marker="o", markersize=3, label=f"{size:,}")
            if policy == PAPER_POLICY:
                axes.axhspan(*PAPER_RECENT, color=INK, alpha=0.12, linewidth=0, label="paper, all layers")
            axes.set_ylim(0, 1.03)
            _percent(axes)
            _label(axes, policy, "layer", "recent share of kept KV rows")
        panels[0].legend(frameon=False, title="size", loc="lower right")
        whole.suptitle(title, fontsize=9)


def first_positions(study: Study, folder: Path, title: str) -> None:
    """Mean steps kept of the first positions."""
    policies = study.policies
    with save_figure(folder, "first-positions", len(policies), 1.2 + 4 * len(policies)) as (whole, panels):
        for axes, policy in zip(panels, policies, strict=True):
            for size in study.sizes_of(policy):
                means = study.summaries[policy, size].first(PAPER_POSITIONS)
                axes.plot(means, marker="o", markersize=3, label=f"{size:,}")
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter("{x:,.0f}")
            _label(axes, policy, "position", "mean steps kept")
        panels[-1].legend(frameon=False, title="size", loc="center left", bbox_to_anchor=(1, 0.5))
        whole.suptitle(title, fontsize=9)


def tags(study: Study, folder: Path, title: str) -> None:
    """Steps kept relative to all tokens, to compare models, sizes and lengths."""
    if not study.by_tag:
        return
    every, *rest = study.by_tag
    known = [lived for lived in rest if lived.name in PAPER_TAGS]
    panels = list(study.summaries)
    height = 1.4 + 0.19 * len(known)
    with save_figure(folder, "tags", len(panels), 0.8 + 2.6 * len(panels), height=height) as (whole, drawn_panels):
        for axes, cell in zip(drawn_panels, panels, strict=True):
            rows = numpy.arange(len(known))
            axes.axvline(1, color=INK, linewidth=0.8)
            if cell[0] == PAPER_POLICY and cell[1] in PAPER_SIZES:
                i = PAPER_SIZES.index(cell[1])
                theirs = [PAPER_TAGS[lived.name][i] / PAPER_TAGS[ALL][i] for lived in known]
                axes.scatter(theirs, rows, s=18, facecolors="none", edgecolors=INK, label="paper")
            ours = [lived.mean[cell].value / every.mean[cell].value for lived in known]
            axes.scatter(ours, rows, s=14, color="#d9480f", label="here", zorder=3)
            axes.set_yticks(rows, [lived.name.replace("$", r"\$") for lived in known], fontsize=7)
            axes.set_ylim(len(known) - 0.4, -0.6)
            axes.grid(axis="y", alpha=0.15)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
            _label(axes, f"{cell[0]} {cell[1]:,}", "steps kept, all tokens = 1", "")
        drawn_panels[0].legend(frameon=False, loc="lower right")
        whole.suptitle(title, fontsize=9)


def lifetimes(study: Study, folder: Path, title: str) -> None:
    """The share of KV rows that survive a number of steps."""
    policies = study.policies
    with save_figure(folder, "lifetimes", len(policies), 1.2 + 4 * len(policies)) as (whole, panels):
        for axes, policy in zip(panels, policies, strict=True):
            for size in study.sizes_of(policy):
                survival = study.summaries[policy, size].survival
                axes.plot(numpy.arange(1, len(survival) + 1), survival, label=f"{size:,}")
            axes.set_xscale("log", base=2)
            _percent(axes)
            _label(axes, policy, "steps", "share of KV rows kept this long or longer")
        panels[-1].legend(frameon=False, title="size")
        whole.suptitle(title, fontsize=9)


def longest_lived(study: Study, folder: Path, title: str, strings: Strings) -> None:
    """The token ids that are kept longest, with their mean steps kept."""
    cells = list(study.summaries)
    if not longest(study, cells[0]):
        return
    with save_figure(folder, "longest-lived", len(cells), 0.6 + 2.7 * len(cells), height=5) as (whole, panels):
        for axes, cell in zip(panels, cells, strict=True):
            top = longest(study, cell)
            axes.barh(range(len(top)), [steps for _, _, steps in top], color="#f08c3a")
            names = [repr(strings(token)).replace("$", r"\$") for token, _, _ in top]
            axes.set_yticks(range(len(top)), names, fontsize=7, family="monospace")
            axes.invert_yaxis()
            _label(axes, f"{cell[0]} {cell[1]:,}", "mean steps kept", "")
        whole.suptitle(title, fontsize=9)


def between_policies(study: Study, folder: Path, title: str) -> None:
    """The overlap of what each pair of policies keeps."""
    if not study.agreements:
        return
    names, sizes = study.policies, study.sizes
    width = 1 + len(sizes) * (1.4 + 0.55 * len(names))
    with save_figure(folder, "policies", len(sizes), width, height=1.6 + 0.55 * len(names)) as (whole, panels):
        for axes, size in zip(panels, sizes, strict=True):
            square = numpy.full((len(names), len(names)), numpy.nan)  # a pair that was not traced is left blank
            numpy.fill_diagonal(square, 1)
            for (one, other, n), share in study.agreements.items():
                if n == size:
                    i, j = names.index(one), names.index(other)
                    square[i, j] = square[j, i] = share
            _square(axes, square, names)
            axes.set_title(f"size {size:,}", fontsize=9)
        whole.suptitle(f"overlap of what policies keep, {title}", fontsize=9)


def between_layers(study: Study, folder: Path, title: str) -> None:
    """The overlap of what each pair of layers keeps."""
    cells = list(study.summaries.values())
    if len(cells[0].layers) < 2:
        return
    columns = min(4, len(cells))
    rows = -(-len(cells) // columns)
    with save_figure(folder, "layers", columns, 0.8 + 3.2 * columns, rows, 3.2 * rows + 0.4) as (whole, panels):
        for axes in panels:
            axes.set_axis_off()
        for axes, one in zip(panels, cells, strict=False):
            axes.set_axis_on()
            image = axes.imshow(one.between_layers, cmap=_colormap(), vmin=0, vmax=1, interpolation="nearest")
            axes.set_title(one.label, fontsize=9)
        whole.colorbar(image, ax=panels, shrink=0.7, label="overlap")
        whole.suptitle(f"overlap of what layers keep, {title}", fontsize=9)


def between_heads(study: Study, folder: Path, title: str) -> None:
    """The overlap and the recent share of the heads of a layer, for policies per head."""
    cells = headwise(study)
    if not cells:
        return
    with save_figure(folder, "heads", len(cells), 1.2 + 3.6 * len(cells)) as (whole, panels):
        for axes, one in zip(panels, cells, strict=True):
            axes.plot(one.layers, one.between_heads.mean(-1), color=INK, label="overlap of a layer's heads")
            for head in range(one.heads):
                label = "recent share, each head" if head == 0 else None
                axes.plot(one.layers, one.recent[:, head], color="#f08c3a", linewidth=0.8, alpha=0.8, label=label)
            _percent(axes)
            _label(axes, one.label, "layer", "")
        panels[-1].legend(frameon=False)
        whole.suptitle(title, fontsize=9)


def _square(axes: Any, square: Any, names: list[str]) -> None:
    axes.imshow(square, cmap=_colormap(), vmin=0, vmax=1)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=7)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    for (i, j), share in numpy.ndenumerate(square):
        if numpy.isnan(share):
            continue
        axes.text(j, i, f"{share:.0%}", ha="center", va="center", fontsize=7, color="white" if share > 0.65 else INK)


def _colormap() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("msrnn", COLOURS)


def _percent(axes: Any) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1))


def _label(axes: Any, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
