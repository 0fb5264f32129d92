"""Draw docs/figures/readme.svg from the table in docs/results/perplexity.md: `python -m benchmarks.readme_figure`."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, NullLocator

DOCS = Path(__file__).parent.parent / "docs"
SIZES = [64, 128, 256, 512, 1024, 2048]
LINES = {"baseline": "full model, text cut to that length", "window+4": "window+4", "tova": "TOVA", "echo": "echo"}


def distances(page: str) -> dict[str, list[float]]:
    """Per cent above the full model's perplexity, by policy, at each size. The last column is the full model."""
    found = {}
    for policy in LINES:
        row = re.search(rf"^\| `{re.escape(policy)}` \| (.*) \|$", page, re.MULTILINE)
        if row is None:
            raise ValueError(f"docs/results/perplexity.md has no row for {policy}")
        *values, full = (float(cell.split()[0]) for cell in row[1].split(" | "))
        found[policy] = [100 * (value / full - 1) for value in values]
    return found


def draw(lines: dict[str, list[float]], path: Path) -> None:
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "msrnn", "font.size": 11})
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for policy, values in lines.items():
        axes.plot(SIZES, values, marker="o", markersize=4, label=LINES[policy])
    axes.set(xscale="log", yscale="log", xlabel="KV cache rows per layer; texts have 4,096 tokens")
    axes.set_title("Perplexity above the full model, per cent (SmolLM2-135M, PG-19)", fontsize=11, loc="left")
    for axis, ticks in ((axes.xaxis, SIZES), (axes.yaxis, [1, 3, 10, 30, 100])):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(distances((DOCS / "results" / "perplexity.md").read_text()), DOCS / "figures" / "readme.svg")
