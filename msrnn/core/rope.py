"""RoPE: which position ids the kept tokens get, and how keys and queries are re-rotated to them.

A model can read past its training length if the kept tokens are moved closer together. New positions are a function of
which tokens are kept, and are never stored: keys stay as the model rotated them, at their original positions, and are
re-rotated from there whenever they are read.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from msrnn.errors import UsageError

ORIGINAL = "original"
NEAR = 10  # the named functions leave gaps up to this one unchanged
_ABSENT = torch.iinfo(torch.int32).max

Gap = Callable[[int], float]  # the new distance of two adjacent kept tokens, from their distance in the text
REMEMBERED = 2**16  # most results of a caller's function that are cached
_BUILD_LOCK = threading.RLock()


@dataclass(frozen=True)
class Spacing:
    """The new distance of adjacent kept tokens, as a function of their distance in the text (their gap)."""

    name: str  # recorded in saved states
    function: Callable[[Tensor], Tensor]  # of gaps [...] float64, 1 or more
    _tables: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    def get_table(self, key: Hashable, build: Callable[[], Any]) -> Any:
        """A table that a backend derives from this function; built once and cached as long as this object lives.

        Captured CUDA graphs read such tables, so they must not be freed while a graph lives.
        """
        if key not in self._tables:
            with _BUILD_LOCK:
                if key not in self._tables:
                    self._tables[key] = build()
        return self._tables[key]

    def __deepcopy__(self, _: dict[int, Any]) -> Spacing:
        return self

    def reposition_sorted(self, position: Tensor) -> Tensor:
        """Positions [..., n] in ascending order -> new positions, float64; the first is 0."""
        new_gaps = self.function(position.diff(dim=-1).double())
        return torch.cat([new_gaps.new_zeros(*new_gaps.shape[:-1], 1), new_gaps.cumsum(-1)], dim=-1)

    def reposition(self, position: Tensor, present: Tensor) -> Tensor:
        """The same for [..., N] in any order, where `present`; the result elsewhere is meaningless."""
        ordered, order = position.masked_fill(~present, _ABSENT).sort(-1)
        last = ordered.masked_fill(ordered == _ABSENT, -1).amax(-1, keepdim=True).clamp(min=0)
        new = self.reposition_sorted(torch.minimum(ordered, last))
        return torch.empty_like(new).scatter_(-1, order, new)


def _beyond(far: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda gaps: torch.where(gaps > NEAR, far(gaps.clamp(min=NEAR)), gaps)


@dataclass(frozen=True)
class Capped:
    """Gaps above a limit become that limit."""

    limit: int

    def __call__(self, gaps: Tensor) -> Tensor:
        return gaps.clamp(max=self.limit)


COMPRESSED, COMPACT, FITTED = "compressed", "compact", "fitted"
SPACINGS: dict[str, Spacing] = {
    spacing.name: spacing
    for spacing in (
        Spacing(COMPACT, Capped(1)),
        Spacing("compressed:lnln", _beyond(lambda gaps: gaps.log().log())),
        Spacing("compressed:ln", _beyond(torch.log)),
        Spacing("compressed:sqrt", _beyond(torch.sqrt)),
    )
}
MEANINGS: dict[str, str] = {
    ORIGINAL: "the positions in the text (the default)",
    COMPACT: "0, 1, 2, … (StreamingLLM, Xiao et al. 2023)",
    "compressed:lnln": f"gaps above {NEAR} become ln ln gap; `compressed` is short for it (Oren et al. 2024)",
    "compressed:ln": f"gaps above {NEAR} become ln gap",
    "compressed:sqrt": f"gaps above {NEAR} become their square root",
    "compressed:N": "gaps above N become N, for any whole number N",
    FITTED: "compressed:N with the largest N at which the kept tokens always fit the training length",
}


class GapFunction:
    """A caller's function of one gap, applied to tensors.

    It is called once for each gap that occurs, by one thread at a time. Results are cached, not tabulated: a gap may be
    as large as a position.
    """

    def __init__(self, gap: Gap) -> None:
        self.gap = gap
        self._known: dict[int, float] = {}
        self._calling = threading.RLock()

    def __call__(self, gaps: Tensor) -> Tensor:
        distinct, index = gaps.long().unique(return_inverse=True)
        new_gaps = [self.of(gap) for gap in distinct.tolist()]
        return torch.tensor(new_gaps, dtype=torch.float64, device=gaps.device)[index]

    def of(self, gap: int) -> float:
        if gap <= 0:
            return 0.0  # two columns without a token
        known = self._known.get(gap)
        return known if known is not None else self._compute_once(gap)

    def _compute_once(self, gap: int) -> float:
        with self._calling:
            if gap not in self._known:
                if len(self._known) >= REMEMBERED:
                    self._known = {}
                self._known[gap] = self._evaluate(gap)
            return self._known[gap]

    def table(self, count: int) -> Tensor:
        """[count] float64, of gaps from 0."""
        with self._calling:
            new_gaps = [0.0, *(self._evaluate(gap) for gap in range(1, count))]
        return torch.tensor(new_gaps, dtype=torch.float64)

    def _evaluate(self, gap: int) -> float:
        new = float(self.gap(gap))
        if not (math.isfinite(new) and new >= 0):
            raise UsageError(f"positions: the function returns {new} for a gap of {gap}; it must be finite, 0 or more")
        return new


def spacing(positions: str | Gap, fitting: int = 1) -> Spacing | None:
    """The spacing of a name or a function of a gap; None: original positions. `fitting` is the N of "fitted"."""
    if callable(positions):
        function = GapFunction(positions)
        return Spacing(f"{COMPRESSED}:{_digest(function)}", function)
    if not isinstance(positions, str):
        raise TypeError(f"positions={positions!r}: must be a name such as {COMPRESSED!r}, or a function of a gap")
    if positions == ORIGINAL:
        return None
    if positions == FITTED:
        return Spacing(FITTED, Capped(fitting))
    limit = positions.removeprefix(f"{COMPRESSED}:")
    if limit != positions and limit.isdecimal() and int(limit):
        return Spacing(f"{COMPRESSED}:{int(limit)}", Capped(int(limit)))
    named = SPACINGS.get("compressed:lnln" if positions == COMPRESSED else positions)
    if named is None:
        names = [*MEANINGS, COMPRESSED]
        near = difflib.get_close_matches(positions, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(names)}"
        raise UsageError(hint, name="positions", value=positions)
    return named


def name_of(spacing_: Spacing | None) -> str:
    """The name that states and results record."""
    return spacing_.name if spacing_ else ORIGINAL


def _digest(function: GapFunction) -> str:
    """Identifies a function by its results for some gaps, not by its name."""
    some = function(torch.tensor([*range(1, 17), *(2**i for i in range(5, 13))]))
    return hashlib.sha256(some.numpy().tobytes()).hexdigest()[:12]


@dataclass(frozen=True, eq=False)
class Rope:
    """A model's rotary position embedding: it rotates pair i of the dimensions by position · frequency[i].

    A factor that the model puts on its cosines stays in the keys it wrote: re-rotation does not change lengths.
    """

    frequency: Tensor  # [F] float32
    start: int = 0  # the first dimension that is rotated; 2 · F are
    interleaved: bool = False  # pairs are neighbours (2i, 2i + 1), not (i, i + F)

    @property
    def pairs(self) -> tuple[slice, slice]:
        """The first and the second dimension of every pair."""
        start, middle, stop = (self.start + n * len(self.frequency) for n in range(3))
        if self.interleaved:
            return slice(start, stop, 2), slice(start + 1, stop, 2)
        return slice(start, middle), slice(middle, stop)

    def angle(self, position: Tensor, new_position: Tensor) -> Tensor:
        """The angle that takes a row from `position` [...] to `new_position`: [..., F] float64.

        The model forms its own angle in float32, where adjacent angles at position 1,000,000 are 0.06 apart. The same
        float32 product is undone here, so its rounding error cancels. Everything else is float64.
        """
        applied = position[..., None].float() * self.frequency
        return new_position[..., None].double() * self.frequency.double() - applied.double()

    def rotate(self, rows: Tensor, angle: Tensor) -> Tensor:
        """Rotate rows [..., D] by angle [..., F]; float32."""
        rotated = rows.to(torch.float32, copy=True)
        (first, second), cos, sin = self.pairs, angle.cos().float(), angle.sin().float()
        x, y = rows[..., first].float(), rows[..., second].float()
        rotated[..., first] = x * cos - y * sin
        rotated[..., second] = y * cos + x * sin
        return rotated


@dataclass(frozen=True, eq=False)
class Repositioning:
    """New positions for the kept tokens of one layer, and the rotation that takes keys and queries there."""

    spacing: Spacing
    rope: Rope

    def rerotate(self, rows: Tensor, position: Tensor, new_position: Tensor) -> Tensor:
        """Re-rotate rows [..., D] that the model rotated at `position` [...] to `new_position` [...]."""
        return self.rope.rotate(rows, self.rope.angle(position, new_position))
