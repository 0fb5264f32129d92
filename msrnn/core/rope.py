"""Where kept tokens stand: as they stood in the text, or closer together, so that a model can go on past the length
that it was trained for.

Positions are a function of what is kept, and are never stored: keys stay as they were first written, rotated by the
model at their original positions, and are turned from there to where they stand whenever they are read.
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
NEAR = 10  # named functions leave gaps up to here as they are
_ABSENT = torch.iinfo(torch.int32).max

Gap = Callable[[int], float]  # how far apart two neighbours shall stand that were so many tokens apart
REMEMBERED = 2**16  # gaps of which a caller's function is not asked again
_MAKING = threading.RLock()


@dataclass(frozen=True)
class Spacing:
    """How far apart neighbours among the kept tokens stand, by how far apart they were in the text."""

    name: str  # as states are saved under
    function: Callable[[Tensor], Tensor]  # of gaps [...] float64, 1 or more
    _made: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    def made(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What a backend makes of this function, made once. It lives as long as this object does: captured CUDA graphs
        read it, and their plan holds this object.
        """
        if key not in self._made:
            with _MAKING:
                if key not in self._made:
                    self._made[key] = make()
        return self._made[key]

    def __deepcopy__(self, _: dict[int, Any]) -> Spacing:
        return self

    def along(self, position: Tensor) -> Tensor:
        """Positions [..., n] in ascending order -> where these tokens stand, float64; the first at 0."""
        apart = self.function(position.diff(dim=-1).double())
        return torch.cat([apart.new_zeros(*apart.shape[:-1], 1), apart.cumsum(-1)], dim=-1)

    def places(self, position: Tensor, present: Tensor) -> Tensor:
        """The same in any order, for those of [..., N] that are present; what the others get means nothing."""
        ordered, order = position.masked_fill(~present, _ABSENT).sort(-1)
        last = ordered.masked_fill(ordered == _ABSENT, -1).amax(-1, keepdim=True).clamp(min=0)
        places = self.along(torch.minimum(ordered, last))
        return torch.empty_like(places).scatter_(-1, order, places)


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
    ORIGINAL: "as in the text (the default)",
    COMPACT: "0, 1, 2, … (StreamingLLM, Xiao et al. 2023)",
    "compressed:lnln": f"gaps above {NEAR} become ln ln gap, as `compressed` alone means (Oren et al. 2024)",
    "compressed:ln": f"gaps above {NEAR} become ln gap",
    "compressed:sqrt": f"gaps above {NEAR} become their root",
    "compressed:N": "gaps above N, any whole number, become N",
    FITTED: "the same with the largest N at which all that is kept fits the length that the model was made for",
}


class GapFunction:
    """A caller's own function of one gap, for many at once. It is called once for each gap that occurs, by one thread
    at a time, and remembers the last results: a gap may be as large as a position, so they are never tabulated.
    """

    def __init__(self, gap: Gap) -> None:
        self.gap = gap
        self._known: dict[int, float] = {}
        self._calling = threading.RLock()

    def __call__(self, gaps: Tensor) -> Tensor:
        distinct, index = gaps.long().unique(return_inverse=True)
        made = [self.of(gap) for gap in distinct.tolist()]
        return torch.tensor(made, dtype=torch.float64, device=gaps.device)[index]

    def of(self, gap: int) -> float:
        if gap <= 0:
            return 0.0  # two columns without a token
        known = self._known.get(gap)
        return known if known is not None else self._asked(gap)

    def _asked(self, gap: int) -> float:
        with self._calling:
            if gap not in self._known:
                if len(self._known) >= REMEMBERED:
                    self._known = {}
                self._known[gap] = self._checked(gap)
            return self._known[gap]

    def table(self, count: int) -> Tensor:
        """[count] float64, of gaps from 0."""
        with self._calling:
            made = [0.0, *(self._checked(gap) for gap in range(1, count))]
        return torch.tensor(made, dtype=torch.float64)

    def _checked(self, gap: int) -> float:
        apart = float(self.gap(gap))
        if not (math.isfinite(apart) and apart >= 0):
            raise UsageError(f"positions: this function makes {apart} of a gap of {gap}; it must be finite, 0 or more")
        return apart


def spacing(positions: str | Gap, fitting: int = 1) -> Spacing | None:
    """What `positions` means: a name, or a function of a gap; None: as in the text. `fitting` is the N of `fitted`."""
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
    found = SPACINGS.get("compressed:lnln" if positions == COMPRESSED else positions)
    if found is None:
        names = [*MEANINGS, COMPRESSED]
        near = difflib.get_close_matches(positions, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(names)}"
        raise UsageError(f"positions={positions!r}: {hint}")
    return found


def name_of(apart: Spacing | None) -> str:
    """The one that states and rows are known by."""
    return apart.name if apart else ORIGINAL


def _digest(function: GapFunction) -> str:
    """Tells functions apart by what they make of some gaps, not by their name."""
    some = function(torch.tensor([*range(1, 17), *(2**i for i in range(5, 13))]))
    return hashlib.sha256(some.numpy().tobytes()).hexdigest()[:12]


@dataclass(frozen=True, eq=False)
class Rotary:
    """The model's own rotation of queries and keys: pair i of their dimensions by position · frequency[i].

    Whatever factor the model puts on its cosines stays on what it wrote: turning leaves lengths as they are.
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

    def angle(self, position: Tensor, place: Tensor) -> Tensor:
        """By how much to turn what was rotated at `position` [...], that it stand at `place`: [..., F] float64.

        The model forms its angle in float32, where those of position 1,000,000 are 0.06 apart. That very product is
        what is undone, so its rounding goes with it; all else is float64, since the difference to a far angle is far.
        """
        applied = position[..., None].float() * self.frequency
        return place[..., None].double() * self.frequency.double() - applied.double()

    def turned(self, rows: Tensor, angle: Tensor) -> Tensor:
        """rows [..., D] by angle [..., F], float32."""
        turned = rows.to(torch.float32, copy=True)
        (first, second), cos, sin = self.pairs, angle.cos().float(), angle.sin().float()
        x, y = rows[..., first].float(), rows[..., second].float()
        turned[..., first] = x * cos - y * sin
        turned[..., second] = y * cos + x * sin
        return turned


@dataclass(frozen=True, eq=False)
class Places:
    """Where the tokens of one layer stand, and how its keys and queries get there."""

    spacing: Spacing
    rotary: Rotary

    def moved(self, rows: Tensor, position: Tensor, place: Tensor) -> Tensor:
        """rows [..., D] that the model rotated at `position` [...], as if it had rotated them at `place` [...]."""
        return self.rotary.turned(rows, self.rotary.angle(position, place))
