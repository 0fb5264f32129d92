"""The cost of bounding one layer alone, by layer and size: the curves that a budget is computed from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from msrnn.budget import FORMAT, Curves
from msrnn.core.atomic import write_atomically
from msrnn.evaluation import statistics
from msrnn.evaluation.cells import FULL
from msrnn.evaluation.data.texts import Data
from msrnn.evaluation.report import Formatted, Table, Value, document, save_figure
from msrnn.evaluation.schemas import check_of
from msrnn.evaluation.store import Record
from msrnn.evaluation.tasks.perplexity import ChunkLosses, LossSchema, Reader
from msrnn.hf.rnn import MultiStateRNN
from msrnn.policy import Policy
from msrnn.size import Size, joint_numbers

NAME = "budget"


class LayerLossSchema(LossSchema):
    layer: int | None


CHECK = check_of(LayerLossSchema)
LEAST_SHOWN = 1e-5  # nats; less is noise, or nothing


class Case(NamedTuple):
    """One layer at a size, while the other layers keep everything; `Case(FULL)` is the full model."""

    policy: str
    layer: int | None = None
    size: int | None = None

    @property
    def label(self) -> str:
        return FULL if self.layer is None else f"layer {self.layer} at {self.size}"

    @property
    def key(self) -> Record:
        numbers = joint_numbers(Policy.parse(self.policy), None)
        return {"policy": self.policy, "numbers": numbers, "layer": self.layer, "size": self.size}


def layer_loss_task(model: PreTrainedModel, data: Data, metadata: Record) -> ChunkLosses[Case]:
    """Each cell is one bounded layer."""
    return ChunkLosses(model, data, metadata, _layer_reader, _case_of)


def _case_of(record: Record) -> Case:
    return Case(record["policy"], record["layer"], record["size"])


def _layer_reader(model: PreTrainedModel, case: Case, opening: int) -> Reader:
    policy = Policy.parse(case.policy)
    if case.layer is None:
        return Reader(MultiStateRNN(model, policy, None), opening)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    size = Size(tuple(case.size if layer == case.layer else None for layer in range(layers)))
    return Reader(MultiStateRNN(model, policy, size), opening)


@dataclass(frozen=True)
class Report:
    """The curves, and what they give each layer at some mean sizes."""

    policy: str
    layers: Sequence[int]
    sizes: Sequence[int]
    results: dict[Case, list[float]]
    predicted: int  # tokens of each chunk
    means: Sequence[int]

    def cost(self, layer: int, size: int) -> statistics.Estimate:
        """Nats per token more than the full model, on the same chunks."""
        full = self.results[Case(FULL)]
        counts = [self.predicted] * len(full)
        return statistics.difference(self.results[Case(self.policy, layer, size)], full, counts)

    @cached_property
    def curves(self) -> Curves:
        losses = [tuple(self.cost(layer, size).value for size in self.sizes) for layer in self.layers]
        return Curves(tuple(self.sizes), tuple(losses))

    @cached_property
    def divided(self) -> dict[int, list[int]]:
        """The size of each layer, by mean size."""
        return {mean: self.curves.sizes(mean, len(self.layers)) for mean in self.means}

    def tables(self, title: str) -> list[Table]:
        costs: list[list[Value]] = [
            [layer, *(_format_cost(self.cost(layer, size)) for size in self.sizes)] for layer in self.layers
        ]
        note = "Thousandths of a nat per token more than the full model, where only this layer is bounded."
        header = ["layer", *(f"{size:,}" for size in self.sizes)]
        rows: list[list[Value]] = [
            [layer, *(self.divided[mean][i] for mean in self.means)] for i, layer in enumerate(self.layers)
        ]
        rows.append(["all", *(sum(self.divided[mean]) for mean in self.means)])
        means = ["layer", *(f"{mean:,}" for mean in self.means)]
        first = Table(NAME, f"cost of bounding one layer, in 1/1,000 nat: {title}", note, header, costs, self._lines())
        if not self.means:
            return [first]
        return [first, Table("", "rows of each layer, by mean size", "Rows of each layer, by mean size.", means, rows)]

    def _lines(self) -> list[Sequence[Any]]:
        lines: list[Sequence[Any]] = [("layer", "size", "nats", "low", "high")]
        return lines + [(layer, size, *self.cost(layer, size)) for layer in self.layers for size in self.sizes]

    def markdown(self, title: str, facts: dict[str, Any]) -> str:
        about = f"{title}. Intervals are 95 %, by bootstrap over the chunks."
        return document("Budget", about, self.tables(title), facts)

    def write(self, path: Path, facts: dict[str, Any]) -> None:
        """The file that a size names as its budget."""
        losses = [list(row) for row in self.curves.losses]
        data = {"format": FORMAT, "policy": self.policy, "sizes": list(self.sizes), "losses": losses, "about": facts}
        write_atomically(path, partial(_write, json.dumps(data, indent=1)))


def _write(text: str, path: Path) -> None:
    path.write_text(text)


def _format_cost(cost: statistics.Estimate) -> Formatted:
    return Formatted(cost, lambda nats: f"{1000 * nats:.2f}")


def figure(report: Report, folder: Path, title: str) -> None:
    """budget.png and .svg: the cost of each layer by size, and the rows that each layer gets."""
    with save_figure(folder, NAME, 2, 11) as (whole, panels):
        for size in report.sizes:
            costs = [max(LEAST_SHOWN, report.cost(layer, size).value) for layer in report.layers]
            panels[0].plot(report.layers, costs, marker="o", markersize=3, label=f"{size:,}")
        panels[0].set_yscale("log")
        panels[0].set_ylabel("nats per token that bounding this layer costs")
        for mean, sizes in report.divided.items():
            panels[1].plot(report.layers, [size / mean for size in sizes], marker="o", markersize=3, label=f"{mean:,}")
        panels[1].set_ylabel("rows of the layer, divided by the mean")
        for axes, name in zip(panels, ("size", "mean size"), strict=True):
            axes.set_xlabel("layer")
            axes.legend(frameon=False, fontsize=8, title=name, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))
        whole.suptitle(title, fontsize=10)
