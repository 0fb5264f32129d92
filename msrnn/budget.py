"""Budgets: how a mean size is divided among the layers of a model. A name, or a file that `msrnn budget` writes."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from msrnn.checks import is_number
from msrnn.errors import FileError, UsageError

FORMAT = "msrnn budget 1"
# The sizes that a measured budget gives, as shares of the mean: few, since a GPU compiles decode kernels for each.
LEVELS = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1, 3 / 2, 2, 3, 4, 6, 8)
_LEAST_LOSS = 1e-7  # nats per token; losses below are noise, and their logarithm is needed


@dataclass(frozen=True)
class Shape:
    """The same shares at every size: a function of the number of layers, whose values have a mean of 1."""

    shares: Callable[[int], Sequence[float]]

    def sizes(self, mean: int, layers: int) -> list[int]:
        exact = [mean * share for share in self.shares(layers)]
        sizes = [max(1, math.floor(size)) for size in exact]
        # What rounding took goes to those that lost most.
        order = sorted(range(layers), key=lambda i: (sizes[i] - exact[i], i))
        for i in order[: mean * layers - sum(sizes)]:
            sizes[i] += 1
        return sizes


def _upper(layers: int) -> list[float]:
    half = layers // 2
    return [0.75] * half + [1.0] * (layers % 2) + [1.25] * half


def _pyramid(layers: int) -> list[float]:
    return [1.0] if layers == 1 else [1.95 - 1.9 * i / (layers - 1) for i in range(layers)]


NAMES: dict[str, Shape] = {"upper": Shape(_upper), "pyramid": Shape(_pyramid)}
MEANINGS: dict[str, str] = {
    "upper": "moves a quarter of the lower layers' KV rows to the upper half of the layers",
    "pyramid": "fewer KV rows the higher the layer, in equal steps (PyramidKV, Cai et al. 2024)",
}


@dataclass(frozen=True)
class Curves:
    """For each layer, the loss that bounding this layer alone costs, by size: KV rows go where they gain most."""

    measured: tuple[int, ...]  # sizes, ascending
    losses: tuple[tuple[float, ...], ...]  # nats per token, by layer and size

    @classmethod
    def parse(cls, data: Any) -> Curves:
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        sizes: Any = data.get("sizes")
        losses: Any = data.get("losses")
        if not _are_numbers(sizes, int) or len(sizes) < 2 or sizes[0] < 1 or sorted(set(sizes)) != sizes:
            raise ValueError("its sizes are not two ascending whole numbers or more")
        if not isinstance(losses, list) or not losses or not all(_are_numbers(row, float) for row in losses):
            raise ValueError("its losses are not rows of finite numbers")
        if any(len(row) != len(sizes) for row in losses):
            raise ValueError("its losses do not have a number for each size")
        return cls(tuple(sizes), tuple(tuple(map(float, row)) for row in losses))

    def sizes(self, mean: int, layers: int) -> list[int]:
        if layers != len(self.losses):
            raise UsageError(
                f"this budget was measured on a model with {len(self.losses)} such layers, and this one has {layers}: "
                "run msrnn budget on this model"
            )
        least, most = self.measured[0], self.measured[-1]
        if not least <= mean <= most:
            raise UsageError(
                f"this budget was measured at sizes from {least} to {most}",
                name="size",
                value=mean,
                advice="use a size between them, or measure more",
            )
        levels = sorted({min(max(math.floor(mean * share), least), most) for share in LEVELS} | {least, most})
        curves = [self._curve(layer) for layer in range(layers)]
        level, left = [0] * layers, (mean - least) * layers

        def offer(layer: int) -> tuple[float, int, int]:
            """The gain of each KV row up to the next level: the greatest first, and of equal ones the lowest level."""
            now, more = levels[level[layer]], levels[level[layer] + 1]
            return (curves[layer](more) - curves[layer](now)) / (more - now), level[layer], layer

        offers = [offer(layer) for layer in range(layers)] if len(levels) > 1 else []
        heapq.heapify(offers)
        last = 0
        while offers:
            _, _, layer = heapq.heappop(offers)
            rows = levels[level[layer] + 1] - levels[level[layer]]
            if rows > left:
                continue
            level[layer] += 1
            left -= rows
            last = layer
            if level[layer] + 1 < len(levels):
                heapq.heappush(offers, offer(layer))
        sizes = [levels[i] for i in level]
        for layer in [last, *range(layers)]:  # less than one level is left over
            rows = min(left, most - sizes[layer])
            sizes[layer] += rows
            left -= rows
        return sizes

    def _curve(self, layer: int) -> Callable[[float], float]:
        """The loss at any size: a power of it between two that were measured. More KV rows never cost more."""
        heights = list(self.losses[layer])
        for i in range(len(heights) - 1, -1, -1):
            heights[i] = max(heights[i], _LEAST_LOSS, *heights[i + 1 : i + 2])
        xs, ys = [math.log(size) for size in self.measured], [math.log(height) for height in heights]

        def loss(size: float) -> float:
            x = math.log(size)
            i = next((i for i in range(1, len(xs) - 1) if x < xs[i]), len(xs) - 1)
            return math.exp(ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1]))

        return loss


@dataclass(frozen=True)
class Budget:
    """A division of a mean size among layers, and its name as users write it: one of `NAMES`, or a file."""

    name: str
    division: Shape | Curves

    @property
    def identity(self) -> Any:
        """The identity of this budget in results, as JSON: the content of its file, or its name."""
        if isinstance(self.division, Shape):
            return self.name
        return [list(self.division.measured), [list(row) for row in self.division.losses]]

    def sizes(self, mean: int, layers: int) -> list[int]:
        """The size of each layer; their sum is `mean * layers`."""
        return self.division.sizes(mean, layers)


@cache
def load_budget(name: str) -> Budget:
    """A named budget, or that of a file, which is read once: results of one process have one content."""
    if name.lower() in NAMES:
        return Budget(name.lower(), NAMES[name.lower()])
    path = Path(name)
    try:
        if not path.is_file():
            raise UsageError(f"budget {name!r:.200}: neither a file nor one of {', '.join(NAMES)}")
        return Budget(name, Curves.parse(json.loads(path.read_bytes())))
    except UsageError:
        raise
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        raise FileError(f"not a budget that msrnn wrote ({error})", path, advice="use another file") from error


def _are_numbers(values: Any, kind: type[float]) -> bool:
    def fits(value: Any) -> bool:
        return is_number(value) and isinstance(value, int | kind)

    return isinstance(values, list) and all(map(fits, values))
