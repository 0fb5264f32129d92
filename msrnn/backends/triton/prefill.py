"""Prefill of one chunk of a layer on a GPU: weights for the scan, the scan, masked attention, and filling free slots.

`TorchBackend.prefill` is the reference. Keys and values are read from the slots and from the new tokens without
copying; masks come from positions and eviction times. Index names as in `attend.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from msrnn.backends.base import Prefilled
from msrnn.backends.triton.common import EXACT, at_once, cap_scores, lift_exp, sinks_and_share, strides_of, width
from msrnn.backends.triton.keep import keep_triton
from msrnn.backends.triton.row_weight import weigh_triton
from msrnn.backends.triton.scan import room, scan_triton
from msrnn.core.scores import Scoring
from msrnn.core.slots import Slots

MOST = 64  # rows and candidates of a block
# Weights may exceed their base by e to this power: UNIT times that, times candidates and heads, must not overflow.
HEADROOM = tl.constexpr(10.0)
LOWERED = tl.constexpr(2.0**-40)  # weights times values must not overflow either
VANISHED = tl.constexpr(2.0**-60)  # a sum of lowered weights that has lost precision


class Candidates(NamedTuple):
    """Keys or values of a KV head's candidates, which are in the S slots and then among the new tokens."""

    p_slots: Any  # [S, W]
    p_new: Any  # [C, W], with a stride of its own
    stride: Any
    p_scale: Any  # [S], or None where rows are not quantized
    p_new_scale: Any  # [C]
    o_w: Any  # [BW]
    W: Any


@triton.jit
def _locate(rows, o_n, S):
    """Pointers [BN] to candidates."""
    return tl.where(o_n < S, rows.p_slots + o_n * rows.W, rows.p_new + (o_n - S) * rows.stride)


@triton.jit
def _load(rows, o_n, m_n, S):
    """Candidates [BN, BW]."""
    m_rows = m_n[:, None] & (rows.o_w < rows.W)[None, :]
    return tl.load(_locate(rows, o_n, S)[:, None] + rows.o_w[None, :], mask=m_rows, other=0.0)


@triton.jit
def _load_scale(rows, o_n, m_n, S):
    """The scales [BN] of quantized candidates, float32."""
    p_scale = tl.where(o_n < S, rows.p_scale + o_n, rows.p_new_scale + (o_n - S))
    return tl.load(p_scale, mask=m_n, other=0.0).to(tl.float32)


@triton.jit
def _score(b_q, keys, o_n, m_n, scale, softcap, S):
    """Scores [BC, BN] of queries [BC, BD] with candidates."""
    b_k = _load(keys, o_n, m_n, S)
    b_s = tl.dot(b_q, tl.trans(b_k.to(b_q.dtype)), input_precision=EXACT) * scale
    if keys.p_scale is not None:
        b_s *= _load_scale(keys, o_n, m_n, S)[None, :]
    return cap_scores(b_s, softcap)


@triton.jit
def _score_seen(b_q, b_t, keys, p_position, o_n, scale, softcap, N, S):
    """Scores [BC, BN] of the candidates o_n [BN] that a row could see without evictions, others -inf."""
    m_n = o_n < N
    b_position = tl.load(p_position + o_n, mask=m_n, other=-1)
    m_seen = (b_position >= 0)[None, :] & (b_position[None, :] <= b_t[:, None])
    return tl.where(m_seen, _score(b_q, keys, o_n, m_n, scale, softcap, S), float("-inf"))


@triton.jit
def _weigh(
    b_q, b_t, b_base, b_max, keys, p_position, p_weights, o_row, scale, softcap, stop, N, S, BN: tl.constexpr
):  # fmt: skip
    """Write the weights of the candidates before `stop`, relative to `b_base`; returns each row's largest score."""
    for first in range(0, stop, BN):
        o_n = first + tl.arange(0, BN)
        b_s = _score_seen(b_q, b_t, keys, p_position, o_n, scale, softcap, N, S)
        b_max = tl.maximum(b_max, tl.max(b_s, axis=1))
        b_w = lift_exp(b_s - b_base[:, None])
        # There is room for a whole block: a mask of its columns would make the stores narrower.
        tl.store(p_weights + o_row[:, None] + o_n[None, :], b_w, mask=(o_row >= 0)[:, None])
    return b_max


@triton.jit
def _clear(values, p_position, stop, N, S, BN: tl.constexpr):
    """Make the values of empty slots and of padding zero: attention multiplies them by 0, which NaN would survive."""
    for first in range(0, stop, BN):
        o_n = first + tl.arange(0, BN)
        m_empty = tl.load(p_position + o_n, mask=o_n < N, other=0) < 0
        b_zero = tl.zeros([BN, values.o_w.shape[0]], values.p_slots.dtype.element_ty)
        m_zero = m_empty[:, None] & (values.o_w < values.W)[None, :]
        tl.store(_locate(values, o_n, S)[:, None] + values.o_w[None, :], b_zero, mask=m_zero)


@triton.jit(do_not_specialize=["sink_b", "sink_h", "sink_t", "C", "S"])
def weigh_kernel(
    query, key, value, new_key_scale, keys, key_scale, values, position, query_position, sinks, weights, sink_weights,
    scale, softcap, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, sink_b, sink_h, sink_t, C, S,
    H: tl.constexpr, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Each head's exponentials over all candidates that a row could see without evictions, relative to one of them.

    They are relative to the largest of the first block; where a later score exceeds that by more than HEADROOM, all
    are computed again, relative to the largest of all. They are scaled up, so that kept tokens may score up to 147
    below a maximum that is evicted. Weights of candidates that come after all rows of a program are not written.
    Scales, sinks and softcap may be None.
    """
    i_b, i_h, i_c = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.program_id(0)
    scale = tl.cast(scale, tl.float32)
    i_k, i_g, N = i_h // (H // K), i_h // (H // G), S + C
    o_c, o_d = i_c * BC + tl.arange(0, BC), tl.arange(0, width(D))
    m_c, m_d = o_c < C, o_d < D
    p_q = query + i_b * q_b + i_h * q_h
    b_q = tl.load(p_q + o_c[:, None] * q_t + o_d[None, :], mask=m_c[:, None] & m_d[None, :], other=0.0)
    b_t = tl.load(query_position + i_b * C + o_c, mask=m_c, other=-1)
    o_head = ((i_b * G + i_g) * ROWS + o_c) * (H // G) + i_h % (H // G)
    o_row = tl.where(m_c, o_head * WIDTH, -1)
    o_slots, o_new = (i_b * K + i_k) * S, (i_b * K + i_k) * C
    p_key = key + i_b * k_b + i_k * k_h
    if key_scale is not None:
        key_scale, new_key_scale = key_scale + o_slots, new_key_scale + o_new
    key_rows = Candidates(keys + o_slots * D, p_key, k_t, key_scale, new_key_scale, o_d, D)
    p_position = position + (i_b * G + i_g) * N
    stop = tl.max(tl.where(m_c, S + o_c + 1, 0))
    b_none = tl.full([BC], float("-inf"), tl.float32)
    if sinks is not None:
        b_none = tl.load(sinks + i_b * sink_b + i_h * sink_h + o_c * sink_t, mask=m_c, other=float("-inf"))
    b_s = _score_seen(b_q, b_t, key_rows, p_position, tl.arange(0, BN), scale, softcap, N, S)
    b_base = tl.maximum(b_none, tl.max(b_s, axis=1))
    b_base = tl.where(b_base == float("-inf"), 0.0, b_base)
    b_max = _weigh(b_q, b_t, b_base, b_none, key_rows, p_position, weights, o_row, scale, softcap, stop, N, S, BN)
    # Lower scores are far only where the first block had none.
    m_far = (b_max > float("-inf")) & (tl.abs(b_max - b_base) > HEADROOM)
    if tl.max(m_far.to(tl.int32)) > 0:
        b_base = tl.where(b_max == float("-inf"), 0.0, b_max)
        _weigh(b_q, b_t, b_base, b_none, key_rows, p_position, weights, o_row, scale, softcap, stop, N, S, BN)
    if sinks is not None:
        tl.store(sink_weights + o_head, lift_exp(b_none - b_base), mask=m_c)
    if (i_c == 0) & (i_h % (H // K) == 0):
        o_v, p_value = tl.arange(0, width(DV)), value + i_b * v_b + i_k * v_h
        value_rows = Candidates(values + o_slots * DV, p_value, v_t, None, None, o_v, DV)
        _clear(value_rows, p_position, tl.max(N + o_v * 0), N, S, BN)


@triton.jit
def _find_seen(b_t, b_position, p_evicted, o_n, m_n):
    """The candidates that each row sees, [BC, BN]."""
    b_evicted = tl.load(p_evicted + o_n, mask=m_n, other=-1)
    m_seen = (b_position[None, :] <= b_t[:, None]) & (b_evicted[None, :] >= b_t[:, None])
    return m_seen & (b_position >= 0)[None, :]


@triton.jit
def _attend_scores(
    b_q, b_t, b_max, b_sum, b_o, keys, values, p_position, p_evicted, scale, softcap, stop, N, S,
    BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to the candidates before `stop` by their scores; continues the running maxima and sums."""
    for first in tl.range(0, stop, BN, num_stages=STAGES):
        o_n = first + tl.arange(0, BN)
        m_n = o_n < N
        b_position = tl.load(p_position + o_n, mask=m_n, other=-1)
        m_seen = _find_seen(b_t, b_position, p_evicted, o_n, m_n)
        b_s = tl.where(m_seen, _score(b_q, keys, o_n, m_n, scale, softcap, S), float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, axis=1))
        # Until a KV row was seen the maximum is -inf, and -inf - -inf is NaN.
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp(b_s - b_base[:, None])
        b_old = tl.exp(b_max - b_base)
        b_sum = b_sum * b_old + tl.sum(b_p, axis=1)
        b_v = _load(values, o_n, b_position >= 0, S)
        if values.p_scale is not None:
            b_p *= _load_scale(values, o_n, b_position >= 0, S)[None, :]
        b_o = b_o * b_old[:, None] + tl.dot(b_p.to(b_q.dtype), b_v.to(b_q.dtype), input_precision=EXACT)
        b_max = b_new
    return b_max, b_sum, b_o


@triton.jit
def _attend_weights(
    b_t, b_sum, b_o, p_weights, o_row, m_c, values, p_position, p_evicted, stop, N, S,
    BN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Attend to the candidates before `stop` by the weights that the scan has used."""
    for first in range(0, stop, BN):
        o_n = first + tl.arange(0, BN)
        m_n = o_n < N
        b_position = tl.load(p_position + o_n, mask=m_n, other=-1)
        m_seen = _find_seen(b_t, b_position, p_evicted, o_n, m_n)
        b_w = tl.load(p_weights + o_row[:, None] + o_n[None, :], mask=m_c[:, None], other=0.0)
        b_p = tl.where(m_seen, b_w * LOWERED, 0.0)
        b_sum += tl.sum(b_p, axis=1)
        # Empty slots are zero. A mask that has to be loaded first would delay the loads of values.
        b_v = _load(values, o_n, m_n, S)
        if values.p_scale is not None:
            b_p = tl.where(m_seen, b_p * _load_scale(values, o_n, m_n, S)[None, :], 0.0)
        b_o += tl.dot(b_p.to(DTYPE), b_v.to(DTYPE), input_precision=EXACT)
    return b_sum, b_o


@triton.jit(do_not_specialize=["sink_b", "sink_h", "sink_t", "share_b", "share_h", "share_t", "C", "S"])
def attend_kernel(
    query, key, value, new_key_scale, new_value_scale, keys, values, key_scale, value_scale,
    position, evicted_at, query_position, sinks, share, weights, sink_weights, output,
    scale, softcap, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    sink_b, sink_h, sink_t, share_b, share_h, share_t, C, S,
    H: tl.constexpr, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr, WEIGHED: tl.constexpr,
):  # fmt: skip
    """Masked attention: the queries from a token's position to its eviction see its KV row.

    Where the weights of `weigh_kernel` are given, they are used. Where all that a row still sees has vanished beside
    what was evicted, its program computes scores instead. Scales, sinks, share and softcap may be None.
    """
    i_b, i_h, i_c = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.program_id(0)
    scale = tl.cast(scale, tl.float32)
    i_k, i_g, N = i_h // (H // K), i_h // (H // G), S + C
    o_c, o_d, o_v = i_c * BC + tl.arange(0, BC), tl.arange(0, width(D)), tl.arange(0, width(DV))
    m_c, m_d, m_v = o_c < C, o_d < D, o_v < DV
    b_t = tl.load(query_position + i_b * C + o_c, mask=m_c, other=-1)
    b_sunk, b_sum = tl.zeros([BC], tl.float32), tl.zeros([BC], tl.float32)  # weights of the sink, and of all
    b_o = tl.zeros([BC, width(DV)], tl.float32)
    o_slots, o_new, o_group = (i_b * K + i_k) * S, (i_b * K + i_k) * C, (i_b * G + i_g) * N
    p_key, p_value = key + i_b * k_b + i_k * k_h, value + i_b * v_b + i_k * v_h
    if key_scale is not None:
        key_scale, new_key_scale = key_scale + o_slots, new_key_scale + o_new
        value_scale, new_value_scale = value_scale + o_slots, new_value_scale + o_new
    key_rows = Candidates(keys + o_slots * D, p_key, k_t, key_scale, new_key_scale, o_d, D)
    value_rows = Candidates(values + o_slots * DV, p_value, v_t, value_scale, new_value_scale, o_v, DV)
    p_position, p_evicted = position + o_group, evicted_at + o_group
    stop = tl.max(tl.where(m_c, S + o_c + 1, 0))
    computes = True
    if WEIGHED:
        o_head = ((i_b * G + i_g) * ROWS + o_c) * (H // G) + i_h % (H // G)
        if sinks is not None:
            b_sunk += tl.load(sink_weights + o_head, mask=m_c, other=0.0) * LOWERED
        b_sum, b_o = _attend_weights(
            b_t, b_sunk, b_o, weights, o_head * WIDTH, m_c, value_rows, p_position, p_evicted, stop, N, S,
            BN, query.dtype.element_ty,
        )  # fmt: skip
        computes = tl.max(((b_sum < VANISHED) & (b_t >= 0)).to(tl.int32)) > 0
    if computes:
        p_q = query + i_b * q_b + i_h * q_h
        b_q = tl.load(p_q + o_c[:, None] * q_t + o_d[None, :], mask=m_c[:, None] & m_d[None, :], other=0.0)
        b_max = tl.full([BC], float("-inf"), tl.float32)
        b_sum = tl.zeros([BC], tl.float32)
        b_o = tl.zeros([BC, width(DV)], tl.float32)
        if sinks is not None:
            b_sink = tl.load(sinks + i_b * sink_b + i_h * sink_h + o_c * sink_t, mask=m_c, other=float("-inf"))
            b_max, b_sum = b_sink, (b_sink > float("-inf")).to(tl.float32)
        b_max, b_sum, b_o = _attend_scores(
            b_q, b_t, b_max, b_sum, b_o, key_rows, value_rows, p_position, p_evicted, scale, softcap, stop, N, S,
            BN, 1 if WEIGHED or query.dtype.element_ty == tl.float32 else 2,
        )  # fmt: skip
        if share is not None:
            b_sunk = tl.exp(b_sink - b_max)
    b_sum = tl.where(b_sum == 0, 1.0, b_sum)
    b_o = b_o / b_sum[:, None]
    p_o = output + ((i_b * C + o_c[:, None]) * H + i_h) * DV + o_v[None, :]
    tl.store(p_o, b_o, mask=m_c[:, None] & m_v[None, :])
    if share is not None:
        b_share = tl.where(b_t >= 0, b_sunk / b_sum, 0.0)
        tl.store(share + i_b * share_b + i_h * share_h + o_c * share_t, b_share, mask=m_c)


def _blocks(dim: int, dtype: torch.dtype) -> tuple[int, dict[str, int]]:
    """The rows of a program, and the block sizes of a launch."""
    candidates = at_once(MOST, dim, dtype)
    rows, stages = min(MOST, 2 * candidates), 1 if dtype == torch.float32 else 3
    return rows, {"BC": rows, "BN": candidates, "num_warps": 4, "num_stages": stages}


def prefill_triton(
    slots: Slots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_position: Tensor,
    scoring: Scoring,
    share: Tensor | None = None,
) -> Prefilled:
    (B, H, C, D), (K, DV), (_, G, S) = query.shape, (key.shape[1], value.shape[-1]), slots.position.shape
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    fresh = slots.quantize(key, value)
    key, value = (rows.codes for rows in fresh)
    query_position = query_position.contiguous()
    position, importance, row_weight = slots.candidates(query_position, weigh_triton(slots, *fresh, query_position))
    sinks, share = sinks_and_share(scoring, share, B, C)
    rows, blocks = _blocks(max(D, DV), query.dtype)
    grid, space = (triton.cdiv(C, rows), H, B), room(C, S + C)
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *strides_of(sinks))
    shape = {"H": H, "K": K, "G": G, "D": D, "DV": DV, "ROWS": space.rows, "WIDTH": space.width}
    weights = sink_weights = None
    if slots.bound.policy.decay is not None:
        exact = partial(torch.empty, dtype=torch.float32, device=query.device)
        weights = exact(B, G, space.rows, H // G, space.width)
        sink_weights = exact(weights.shape[:4]) if sinks is not None else None
        new_values, values = (t.view(torch.int8) if slots.state_dtype else t for t in (value, slots.values))
        weigh_kernel[grid](
            query, key, new_values, fresh[0].scale, slots.keys, slots.key_scale, values, position, query_position,
            sinks, weights, sink_weights, scoring.scale, scoring.softcap, *strides, C, S, **shape, **blocks,
        )  # fmt: skip
    joint = [weights, sink_weights]
    if slots.joint is not None:
        joint = [None if part is None else slots.joint.gather(part, 3) for part in joint]
    rest = slots.bound, joint[1], row_weight, slots.ranges, slots.fewer
    evicted_at = scan_triton(joint[0], position, importance, query_position, *rest)
    output = torch.empty(B, C, H, DV, device=query.device, dtype=query.dtype)
    # Weights span more than the range of float16.
    weighed = weights is not None and query.dtype != torch.float16
    attend_kernel[grid](
        query, key, value, fresh[0].scale, fresh[1].scale, slots.keys, slots.values, slots.key_scale, slots.value_scale,
        position, evicted_at, query_position, sinks, share, weights, sink_weights, output,
        scoring.scale, scoring.softcap, *strides, *strides_of(share), C, S, WEIGHED=weighed, **shape, **blocks,
    )  # fmt: skip
    keep_triton(slots, *fresh, position, importance, row_weight, evicted_at)
    return Prefilled(output, position, evicted_at)
