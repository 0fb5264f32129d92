"""New positions of the kept tokens on a GPU, and the rotations that take keys and queries there.

Two launches before a token's attention, where positions are not the original ones; `msrnn.core.rope` is the reference.
Rotations are cosines and sines for every slot and pair of dimensions, computed once for all heads of a group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from msrnn.backends.numba.rope import COSINE, HALF_PI, PER_HALF_PI, SINE, spacing_code
from msrnn.backends.triton.common import hide_protected
from msrnn.bound import Bound
from msrnn.core.rope import NEAR, GapFunction, Repositioning, Spacing
from msrnn.core.slots import Slots
from msrnn.errors import UsageError

LAST = tl.constexpr(2**31 - 1)
NEAREST = tl.constexpr(NEAR)
QUARTER, PER_QUARTER = tl.constexpr(HALF_PI), tl.constexpr(PER_HALF_PI)
S3, S5, S7 = (tl.constexpr(x) for x in SINE)
C4, C6, C8 = (tl.constexpr(x) for x in COSINE)
GAPS = 2**20  # a caller's function is tabulated for smaller gaps; a larger gap makes outputs NaN
LARGEST_GAP = tl.constexpr(GAPS - 1)
ROWS_PER_BLOCK = 32


@triton.jit
def _new_gap(b_gap, table, KIND: tl.constexpr):
    """The new distance of adjacent tokens that are `b_gap` apart, float64; KIND as in `numba/rope.py`."""
    if KIND == 0:
        b_new_gap = tl.load(table + tl.minimum(b_gap, LARGEST_GAP))
        return tl.where(b_gap > LARGEST_GAP, float("nan"), b_new_gap)
    if KIND == 1:
        return tl.minimum(b_gap.to(tl.float64), tl.load(table))
    b_far = tl.maximum(b_gap, NEAREST).to(tl.float64)
    if KIND == 2:
        b_far = tl.log(tl.log(b_far))
    elif KIND == 3:
        b_far = tl.log(b_far)
    else:
        b_far = tl.sqrt(b_far)
    return tl.where(b_gap > NEAREST, b_far, b_gap.to(tl.float64))


@triton.jit
def reposition_kernel(
    position, query_position, protected, table, ordered, ordered_new, new_position, window, spared,
    S: tl.constexpr, G: tl.constexpr, ALL: tl.constexpr, LEVELS: tl.constexpr, KIND: tl.constexpr, SLIDES: tl.constexpr,
    SLIDING: tl.constexpr,
):  # fmt: skip
    """new_position [B, G, S + 1] float64 of every slot and, at the end, of the new token; `ordered` and `ordered_new`
    [B, G, S] are scratch.

    One program per group: it sorts the positions, sums up the new gaps, and each slot finds its own by bisection. The
    first empty slot is left out, so that a size that is a power of two needs no padding to be sorted.
    """
    i = tl.program_id(0).to(tl.int64)
    t = tl.load(query_position + i // G)
    if t >= 0:
        BS: tl.constexpr = 2**LEVELS
        o_all, o_s = tl.arange(0, ALL), tl.arange(0, BS)
        p_position, p_ordered, p_new = position + i * S, ordered + i * S, ordered_new + i * S
        empty = tl.min(tl.where(tl.load(p_position + o_all, mask=o_all < S, other=0) < 0, o_all, ALL))
        o_slot, m_s = o_s + (o_s >= empty).to(tl.int32), o_s < S - 1
        b_position = tl.load(p_position + o_slot, mask=m_s, other=-1)
        if SLIDES:
            b_leaves = b_position if SLIDING else hide_protected(b_position, protected, i // G)
            b_position = tl.where((b_leaves >= spared) & (b_leaves <= t - window), -1, b_position)
        b_ordered = tl.sort(tl.where(b_position >= 0, b_position, LAST))
        tl.store(p_ordered + o_s, b_ordered, mask=m_s)
        tl.debug_barrier()  # threads read what other threads wrote
        m_after = (b_ordered != LAST) & (o_s > 0)
        b_gap = tl.where(m_after, b_ordered - tl.load(p_ordered + o_s - 1, mask=m_after, other=0), 1)
        b_new_position = tl.cumsum(tl.where(m_after, _new_gap(b_gap, table, KIND), 0.0))
        tl.store(p_new + o_s, b_new_position, mask=m_s)
        tl.debug_barrier()
        b_rank = tl.zeros([BS], tl.int32)
        for halving in tl.static_range(1, LEVELS + 1):
            b_next = b_rank + (BS >> halving)
            m_higher = tl.load(p_ordered + b_next, mask=b_next < S - 1, other=LAST) <= b_position
            b_rank = tl.where(m_higher, b_next, b_rank)
        tl.store(new_position + i * (S + 1) + o_slot, tl.load(p_new + b_rank), mask=m_s & (b_position >= 0))
        newest = tl.max(b_position)
        behind = tl.max(b_new_position) + _new_gap(tl.maximum(t - newest, 1), table, KIND)
        tl.store(new_position + i * (S + 1) + S, tl.where(newest >= 0, behind, 0.0))


@triton.jit
def find_rotation(b_angle):
    """Cosine and sine, float32, of an angle in float64: multiples of a quarter rotation are removed first."""
    b_quarters = tl.floor(b_angle * PER_QUARTER + 0.5)
    b_x = (b_angle - b_quarters * QUARTER).to(tl.float32)
    b_xx = b_x * b_x
    b_sin = b_x + b_x * b_xx * (S3 + b_xx * (S5 + b_xx * S7))
    b_cos = 1.0 - 0.5 * b_xx + b_xx * b_xx * (C4 + b_xx * (C6 + b_xx * C8))
    b_q = b_quarters.to(tl.int32)
    m_odd = (b_q & 1) != 0
    b_sin, b_cos = tl.where(m_odd, b_cos, b_sin), tl.where(m_odd, b_sin, b_cos)
    return tl.where(((b_q + 1) & 2) != 0, -b_cos, b_cos), tl.where((b_q & 2) != 0, -b_sin, b_sin)


@triton.jit
def rotation_kernel(
    position, query_position, new_position, frequency, rotations,
    S: tl.constexpr, G: tl.constexpr, F: tl.constexpr, BS: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """rotations [B, G, S + 1, 2, F]: cosines and sines that take a row from its position to its new position.

    The model's own angle is a float32 product, and the same product is undone. The rest is float64 until multiples of
    a quarter rotation are removed.
    """
    i = tl.program_id(0).to(tl.int64)
    t = tl.load(query_position + i // G)
    if t >= 0:
        o_s, o_f = tl.program_id(1) * BS + tl.arange(0, BS), tl.arange(0, BF)
        m_s, m_f = o_s <= S, o_f < F
        b_position = tl.where(o_s == S, t, tl.load(position + i * S + o_s, mask=o_s < S, other=-1))
        m_s = m_s & (b_position >= 0)
        b_new_position = tl.load(new_position + i * (S + 1) + o_s, mask=m_s, other=0.0)
        b_frequency = tl.load(frequency + o_f, mask=m_f, other=0.0)
        b_applied = b_position.to(tl.float32)[:, None] * b_frequency[None, :]
        b_angle = b_new_position[:, None] * b_frequency.to(tl.float64)[None, :] - b_applied.to(tl.float64)
        b_cos, b_sin = find_rotation(b_angle)
        p_rotations = rotations + (i * (S + 1) + o_s[:, None]) * (2 * F) + o_f[None, :]
        m_rotations = m_s[:, None] & m_f[None, :]
        tl.store(p_rotations, b_cos, mask=m_rotations)
        tl.store(p_rotations + F, b_sin, mask=m_rotations)


@triton.jit
def load_rotations(p_rotations, m_rotations, o_f, F: tl.constexpr):
    """Cosines and sines of some rows, float32; `o_f` along the last axis, as for `load_rotated`."""
    b_cos = tl.load(p_rotations + o_f, mask=m_rotations & (o_f < F), other=0.0).to(tl.float32)
    b_sin = tl.load(p_rotations + F + o_f, mask=m_rotations & (o_f < F), other=0.0).to(tl.float32)
    return b_cos, b_sin


@triton.jit
def load_rotated(p_rows, b_cos, b_sin, m_rows, o_f, F: tl.constexpr, START: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """Re-rotated rows at p_rows [..., 1]: first and second dimensions of the pairs, each [..., BF]."""
    p_first = p_rows + START + (2 * o_f if NEIGHBOURS else o_f)
    b_x = tl.load(p_first, mask=m_rows & (o_f < F), other=0.0).to(tl.float32)
    b_y = tl.load(p_first + (1 if NEIGHBOURS else F), mask=m_rows & (o_f < F), other=0.0).to(tl.float32)
    return b_x * b_cos - b_y * b_sin, b_y * b_cos + b_x * b_sin


def _encode_spacing(spacing: Spacing, device: torch.device) -> tuple[int, Tensor]:
    """The kind of a spacing, and its numbers on a GPU: the new distance of every gap, its limit, or none."""
    code, function = spacing_code(spacing), spacing.function

    def numbers() -> Tensor:
        if isinstance(function, GapFunction):
            return function.table(GAPS).to(device)
        return torch.tensor([code.limit], dtype=torch.float64, device=device)

    return code.kind, spacing.get_table(device, numbers)


def check_reach(spacing: Spacing, bound: Bound, columns: int) -> None:
    """Refuse texts whose gaps may exceed the table of a caller's function. Columns are counted, padding included.

    With a window or horizon that spares no tokens, gaps stay small at any length.
    """
    near = bound.window is not None and bound.window <= GAPS and not bound.spared
    if columns > GAPS and not near and isinstance(spacing.function, GapFunction):
        raise UsageError(
            f"positions: your own function is limited to gaps of {GAPS - 1:,} on a GPU, and this state is at column "
            f"{columns:,}; use a named spacing such as 'compressed', a horizon without first or protected tokens, "
            "or a CPU"
        )


def rotations_of(slots: Slots, query_position: Tensor, repositioning: Repositioning) -> Tensor:
    """[B, G, S + 1, 2, F] for every slot and, at the end, the new token; float16 where rows have 16 bits or fewer."""
    (B, G, S), F = slots.position.shape, len(repositioning.rope.frequency)
    device, window = slots.position.device, slots.bound.window
    kind, table = _encode_spacing(repositioning.spacing, device)
    ordered = torch.empty(B, G, S, dtype=torch.int32, device=device)
    ordered_new, new_position = (torch.empty(B, G, n, dtype=torch.float64, device=device) for n in (S, S + 1))
    reposition_kernel[(B * G,)](
        slots.position, query_position, slots.ranges, table, ordered, ordered_new, new_position,
        window or 0, slots.bound.spared, S=S, G=G, ALL=triton.next_power_of_2(S),
        LEVELS=max(1, (S - 2).bit_length()), KIND=kind, SLIDES=window is not None,
        SLIDING=slots.bound.sliding,
    )  # fmt: skip
    dtype = torch.float32 if slots.dtype == torch.float32 else torch.float16
    rotations = torch.empty(B, G, S + 1, 2, F, dtype=dtype, device=device)
    rotation_kernel[(B * G, triton.cdiv(S + 1, ROWS_PER_BLOCK))](
        slots.position, query_position, new_position, repositioning.rope.frequency, rotations,
        S=S, G=G, F=F, BS=ROWS_PER_BLOCK, BF=triton.next_power_of_2(F),
    )  # fmt: skip
    return rotations
