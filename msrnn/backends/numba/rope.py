"""New positions and rotations for the numba loops; `msrnn.core.rope` is the reference."""

from __future__ import annotations

import ctypes
import math
import threading
from typing import Any, NamedTuple

import numpy as np
from numpy import float32 as f32
from numpy import float64 as f64
from numpy import int32 as i32

from msrnn.backends.numba.jit import compile_loop
from msrnn.backends.numba.rows import Array
from msrnn.core.rope import NEAR, Capped, GapFunction, Rope, Spacing

OWN, CAPPED, LNLN, LN, SQRT = range(5)
KINDS = {"compressed:lnln": LNLN, "compressed:ln": LN, "compressed:sqrt": SQRT}
HALF_PI, PER_HALF_PI = math.pi / 2, 2 / math.pi
# of x³, x⁵, x⁷ in a sine and x⁴, x⁶, x⁸ in a cosine, up to an eighth of a rotation
SINE = -1.6666654611e-1, 8.3321608736e-3, -1.9515295891e-4
COSINE = 4.166664568298827e-2, -1.388731625493765e-3, 2.443315711809948e-5
_S3, _S5, _S7 = (f32(x) for x in SINE)
_C4, _C6, _C8 = (f32(x) for x in COSINE)


@compile_loop()
def new_gap(gap: int, kind: int, limit: float, function: Any) -> float:
    """The new distance of two adjacent kept tokens that were `gap` apart; other arguments as in `Code`."""
    if kind == OWN:
        return float(function(gap))
    if kind == CAPPED:
        return min(float(gap), limit)
    if gap <= NEAR:
        return float(gap)
    if kind == SQRT:
        return math.sqrt(gap)
    return math.log(gap) if kind == LN else math.log(math.log(gap))


@compile_loop()
def rotation(frequency: Array, position: i32, new_position: f64, cos: Array, sin: Array) -> None:
    """Cosine and sine of `Rope.angle`, reduced in float64; library calls would keep the loop from vectorising."""
    for d in range(frequency.shape[0]):
        angle = new_position * f64(frequency[d]) - f64(f32(position) * frequency[d])
        quarters = np.floor(angle * PER_HALF_PI + 0.5)
        x = f32(angle - quarters * HALF_PI)
        xx = x * x
        s = x + x * xx * (_S3 + xx * (_S5 + xx * _S7))
        c = f32(1.0) - f32(0.5) * xx + xx * xx * (_C4 + xx * (_C6 + xx * _C8))
        q = np.int64(quarters) & 3
        swapped_s, swapped_c = (c, s) if q & 1 else (s, c)
        sin[d] = -swapped_s if q & 2 else swapped_s
        cos[d] = -swapped_c if (q + 1) & 2 else swapped_c


@compile_loop(fastmath={"contract"})
def rotate(row: Array, start: int, step: int, cos: Array, sin: Array, into: Array) -> None:
    """First dimensions of all pairs, then the second ones, then what is not rotated.

    Scores do not depend on the order of dimensions, if keys and queries share it.
    """
    F, D = cos.shape[0], row.shape[0]
    second = start + F if step == 1 else start + 1
    for d in range(F):
        x, y = row[start + d * step], row[second + d * step]
        into[d] = x * cos[d] - y * sin[d]
        into[F + d] = y * cos[d] + x * sin[d]
    for d in range(start):
        into[2 * F + d] = row[d]
    for d in range(start + 2 * F, D):
        into[d] = row[d]


class Called:
    """A caller's function that numba loops can call. An exception is kept and raised once the loop is done."""

    TYPE = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_int64)

    def __init__(self, function: GapFunction | None) -> None:
        self.function, self.pointer, self._raised = function, self.TYPE(self._call), threading.local()

    def _call(self, gap: int) -> float:
        try:
            assert self.function is not None
            return self.function.of(gap)
        except BaseException as error:  # it cannot pass through the loop
            if not hasattr(self._raised, "error"):
                self._raised.error = error
            return math.nan

    def check(self) -> None:
        """Raise the exception of this thread's last loop, if there was one."""
        error = vars(self._raised).pop("error", None)
        if error is not None:
            raise error


class Code(NamedTuple):
    """A spacing for the loops: its kind, its limit, and the function where it is the caller's own."""

    kind: int
    limit: float
    own: Called


NO_FUNCTION = Called(None)


def spacing_code(spacing: Spacing) -> Code:
    function = spacing.function
    if isinstance(function, GapFunction):
        return Code(OWN, 0.0, spacing.get_table("called", lambda: Called(function)))
    if isinstance(function, Capped):
        return Code(CAPPED, float(function.limit), NO_FUNCTION)
    return Code(KINDS[spacing.name], 0.0, NO_FUNCTION)


def layout(rope: Rope) -> tuple[int, int]:
    """`start` and `step` of `rotate`."""
    return rope.start, 2 if rope.interleaved else 1
