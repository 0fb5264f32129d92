"""Code that the kernels share: exponentials for ranking, the soft cap, protected tokens, and the sizes of blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from msrnn.core import protection
from msrnn.core.scores import Scoring

UNIT, PER_UNIT = tl.constexpr(2.0**86), tl.constexpr(2.0**-86)
ROOT = tl.constexpr(2.0**43)
LEAST_NORMAL = tl.constexpr(2.0**-126)
RANGES = tl.constexpr(protection.RANGES)

LEAST = 16  # the smallest number of rows, columns or dimensions of a matrix product on tensor cores
# Float32 products as three tf32 ones: as accurate as torch's, while full float32 products would spill registers.
EXACT = tl.constexpr("tf32x3")
BYTES = 2**14  # of rows at once: with those loaded ahead they fit into 99 KiB, the shared memory of GPUs since 8.0


@triton.jit
def lift_exp(b_x):
    """UNIT * exp(b_x) for b_x up to 0: a normal number down to -147, where exp alone ends at -87.

    It is computed as a square: adding log(UNIT) to b_x instead would lose precision.
    """
    b_root = tl.exp(0.5 * b_x) * ROOT
    return b_root * b_root


@triton.jit
def cap_scores(b_s, softcap):
    """softcap * tanh(b_s / softcap); the scores themselves where softcap is None."""
    if softcap is not None:
        softcap = tl.cast(softcap, tl.float32)
        b_s = softcap * (1.0 - 2.0 / (tl.exp(2.0 * b_s / softcap) + 1.0))
    return b_s


@triton.jit
def weigh(b_max, b_sum, b_s, m_held):
    """Continue the maxima and sums [BR] of a softmax with scores [BR, BS]: both, what earlier terms shrink to, and new.

    New terms [BR, BS] are relative to the maxima.
    """
    b_s = tl.where(m_held[None, :], b_s, float("-inf"))
    b_top = tl.maximum(b_max, tl.max(b_s, axis=1))
    # Until a KV row was seen the maximum is -inf, and -inf - -inf is NaN.
    b_base = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_p = tl.exp(b_s - b_base[:, None])
    b_old = tl.exp(b_max - b_base)
    return b_top, b_sum * b_old + tl.sum(b_p, axis=1), b_old, b_p


@triton.jit
def hide_protected(b_position, protected, i_b):
    """Positions of sequence i_b, and -1 where one lies in a protected range; `protected` [B, RANGES, 2] may be None."""
    if protected is not None:
        for r in tl.static_range(RANGES):
            begin = tl.load(protected + (i_b * RANGES + r) * 2)
            end = tl.load(protected + (i_b * RANGES + r) * 2 + 1)
            b_position = tl.where((b_position >= begin) & (b_position < end), -1, b_position)
    return b_position


@triton.jit
def lower_limits(size, recent, fewer, i_b):
    """The size and the number of recent tokens of sequence i_b; `fewer` [B, 2] may be None."""
    if fewer is not None:
        size = size - tl.load(fewer + i_b * 2)
        recent = recent - tl.load(fewer + i_b * 2 + 1)
    return size, recent


@triton.jit
def find_row(sequences, i_b):
    """Which sequence of the slots the i-th of a batch is; `sequences` [B] int64 is None where it is the i-th itself."""
    return i_b if sequences is None else tl.load(sequences + i_b)


@triton.jit
def hide_earlier(b_position, sequences, t):
    """Positions; -1 where `sequences` are chosen and t begins one, since its slots then hold another one's tokens."""
    return b_position if sequences is None else tl.where(t == 0, -1, b_position)


@triton.constexpr_function
def width(n: int) -> int:
    """The width of a block that holds n."""
    return max(LEAST, int(triton.next_power_of_2(n)))


def sinks_and_share(
    scoring: Scoring, share: Tensor | None, batch: int, columns: int
) -> tuple[Tensor | None, Tensor | None]:
    """Sinks and share [B, H, C] for a kernel. Without sinks the share is zero, and no kernel has to fill it."""
    sinks = scoring.sinks_of(batch, 1, columns)
    if sinks is not None:
        return sinks[:, 0], share
    if share is not None:
        share.zero_()
    return None, None


def strides_of(tensor: Tensor | None) -> tuple[int, ...]:
    """The strides of a tensor [B, H, C]; some number each for None."""
    return (0, 0, 0) if tensor is None else tensor.stride()


def at_once(most: int, dim: int, dtype: torch.dtype) -> int:
    """Rows of `dim` dimensions in a block, at most `most`."""
    return int(min(most, max(LEAST, BYTES // (width(dim) * dtype.itemsize))))
