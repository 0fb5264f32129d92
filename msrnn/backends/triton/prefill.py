"""Prefill of one chunk of a layer on a GPU: weights for the scan, the scan, masked attention, and filling free slots.

`TorchBackend.prefill` is the reference. Keys and values are read from the slots and from the new tokens without
copying; masks come from positions and eviction times. Index names as in `attend.py`.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from msrnn.backends.base import Prefilled
from msrnn.backends.triton.common import at_once, lifted_exp, width
from msrnn.backends.triton.keep import keep_triton
from msrnn.backends.triton.scan import room, scan_triton
from msrnn.core.scores import Scoring
from msrnn.core.slots import Slots

MOST = 64  # rows and candidates of a block
# Float32 products as three tf32 ones: as accurate as torch's, while full float32 products would spill registers.
EXACT = tl.constexpr("tf32x3")
# Weights may exceed their base by e to this power: UNIT times that, times candidates and heads, must not overflow.
HEADROOM = tl.constexpr(10.0)
LOWERED = tl.constexpr(2.0**-40)  # weights times values must not overflow either
VANISHED = tl.constexpr(2.0**-60)  # a sum of lowered weights that has lost precision


@triton.jit
def _either(slots, s_t, fresh, f_t, o_n, S):
    """Pointers to candidates, which are in the slots and then among the new tokens."""
    return tl.where(o_n < S, slots + o_n * s_t, fresh + (o_n - S) * f_t)


@triton.jit
def _scores(b_q, p_k, p_scale, m_n, o_d, m_d, scale, softcap, QUANTIZED: tl.constexpr, CAPPED: tl.constexpr):
    """Scores [BC, BN] of queries [BC, BD] with the keys at pointers [BN]."""
    b_k = tl.load(p_k[:, None] + o_d[None, :], mask=m_n[:, None] & m_d[None, :], other=0.0)
    b_s = tl.dot(b_q, tl.trans(b_k.to(b_q.dtype)), input_precision=EXACT) * scale
    if QUANTIZED:
        b_s *= tl.load(p_scale, mask=m_n, other=0.0).to(tl.float32)[None, :]
    if CAPPED:
        b_s = softcap * (1.0 - 2.0 / (tl.exp(2.0 * b_s / softcap) + 1.0))
    return b_s


@triton.jit
def _seen_scores(
    b_q, b_t, o_n, p_slots, p_new, k_t, p_scale, p_new_scale, p_position, o_d, m_d, scale, softcap, N, S,
    D: tl.constexpr, QUANTIZED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Scores [BC, BN] of the candidates o_n [BN] that a row could see without evictions, others -inf."""
    m_n = o_n < N
    b_position = tl.load(p_position + o_n, mask=m_n, other=-1)
    m_seen = (b_position >= 0)[None, :] & (b_position[None, :] <= b_t[:, None])
    p_k, p_s = _either(p_slots, D, p_new, k_t, o_n, S), _either(p_scale, 1, p_new_scale, 1, o_n, S)
    b_s = _scores(b_q, p_k, p_s, m_n, o_d, m_d, scale, softcap, QUANTIZED, CAPPED)
    return tl.where(m_seen, b_s, float("-inf"))


@triton.jit
def _weigh(
    b_q, b_t, b_base, b_max, p_slots, p_new, k_t, p_scale, p_new_scale, p_position, p_weights, o_row, o_d, m_d,
    scale, softcap, stop, N, S,
    D: tl.constexpr, BN: tl.constexpr, QUANTIZED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Write the weights of the candidates before `stop`, relative to `b_base`; returns each row's largest score."""
    for first in range(0, stop, BN):
        o_n = first + tl.arange(0, BN)
        b_s = _seen_scores(
            b_q, b_t, o_n, p_slots, p_new, k_t, p_scale, p_new_scale, p_position, o_d, m_d, scale, softcap, N,
            S, D, QUANTIZED, CAPPED,
        )  # fmt: skip
        b_max = tl.maximum(b_max, tl.max(b_s, axis=1))
        b_w = lifted_exp(b_s - b_base[:, None])
        # There is room for a whole block: a mask of its columns would make the stores narrower.
        tl.store(p_weights + o_row[:, None] + o_n[None, :], b_w, mask=(o_row >= 0)[:, None])
    return b_max


@triton.jit
def _clear(p_values, p_new, v_t, p_position, o_v, m_v, stop, N, S, DV: tl.constexpr, BN: tl.constexpr):
    """Make the values of empty slots and of padding zero: attention multiplies them by 0, which NaN would survive."""
    for first in range(0, stop, BN):
        o_n = first + tl.arange(0, BN)
        m_empty = tl.load(p_position + o_n, mask=o_n < N, other=0) < 0
        b_zero = tl.zeros([BN, o_v.shape[0]], p_values.dtype.element_ty)
        p_v = _either(p_values, DV, p_new, v_t, o_n, S)
        tl.store(p_v[:, None] + o_v[None, :], b_zero, mask=m_empty[:, None] & m_v[None, :])


@triton.jit(do_not_specialize=["C", "S"])
def weigh_kernel(
    query, key, value, new_key_scale, keys, key_scale, values, position, query_position, sinks, weights, sink_weights,
    scale, softcap, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, C, S,
    H: tl.constexpr, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    QUANTIZED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Each head's exponentials over all candidates that a row could see without evictions, relative to one of them.

    They are relative to the largest of the first block; where a later score exceeds that by more than HEADROOM, all
    are computed again, relative to the largest of all. They are scaled up, so that kept tokens may score up to 147
    below a maximum that is evicted. Weights of candidates that come after all rows of a program are not written.
    """
    i_b, i_h, i_c = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.program_id(0)
    scale, softcap = tl.cast(scale, tl.float32), tl.cast(softcap, tl.float32)
    i_k, i_g, N = i_h // (H // K), i_h // (H // G), S + C
    o_c, o_d = i_c * BC + tl.arange(0, BC), tl.arange(0, BD)
    m_c, m_d = o_c < C, o_d < D
    p_q = query + i_b * q_b + i_h * q_h
    b_q = tl.load(p_q + o_c[:, None] * q_t + o_d[None, :], mask=m_c[:, None] & m_d[None, :], other=0.0)
    b_t = tl.load(query_position + i_b * C + o_c, mask=m_c, other=-1)
    o_head = ((i_b * G + i_g) * ROWS + o_c) * (H // G) + i_h % (H // G)
    o_row = tl.where(m_c, o_head * WIDTH, -1)
    p_slots, p_scale = keys + (i_b * K + i_k) * S * D, key_scale + (i_b * K + i_k) * S
    p_new, p_new_scale = key + i_b * k_b + i_k * k_h, new_key_scale + (i_b * K + i_k) * C
    p_position = position + (i_b * G + i_g) * N
    stop = tl.max(tl.where(m_c, S + o_c + 1, 0))
    b_none = tl.full([BC], float("-inf"), tl.float32)
    if SINKS:
        b_none = tl.zeros([BC], tl.float32) + tl.load(sinks + i_h)
    b_s = _seen_scores(
        b_q, b_t, tl.arange(0, BN), p_slots, p_new, k_t, p_scale, p_new_scale, p_position, o_d, m_d, scale, softcap, N,
        S, D, QUANTIZED, CAPPED,
    )  # fmt: skip
    b_base = tl.maximum(b_none, tl.max(b_s, axis=1))
    b_base = tl.where(b_base == float("-inf"), 0.0, b_base)
    b_max = _weigh(
        b_q, b_t, b_base, b_none, p_slots, p_new, k_t, p_scale, p_new_scale, p_position, weights, o_row, o_d, m_d,
        scale, softcap, stop, N, S, D, BN, QUANTIZED, CAPPED,
    )  # fmt: skip
    # Lower scores are far only where the first block had none.
    m_far = (b_max > float("-inf")) & (tl.abs(b_max - b_base) > HEADROOM)
    if tl.max(m_far.to(tl.int32)) > 0:
        b_base = tl.where(b_max == float("-inf"), 0.0, b_max)
        _weigh(
            b_q, b_t, b_base, b_none, p_slots, p_new, k_t, p_scale, p_new_scale, p_position, weights, o_row, o_d, m_d,
            scale, softcap, stop, N, S, D, BN, QUANTIZED, CAPPED,
        )  # fmt: skip
    if SINKS:
        tl.store(sink_weights + o_head, lifted_exp(tl.load(sinks + i_h) - b_base), mask=m_c)
    if (i_c == 0) & (i_h % (H // K) == 0):
        o_v = tl.arange(0, BV)
        p_values, p_new_value = values + (i_b * K + i_k) * S * DV, value + i_b * v_b + i_k * v_h
        _clear(p_values, p_new_value, v_t, p_position, o_v, o_v < DV, tl.max(N + o_v * 0), N, S, DV, BN)


@triton.jit
def _attend_scores(
    b_q, b_t, b_max, b_sum, b_o, p_keys, p_new, k_t, p_key_scale, p_new_key_scale, p_values, p_new_value, v_t,
    p_value_scale, p_new_value_scale, p_position, p_evicted, o_d, m_d, o_v, m_v, scale, softcap, stop, N, S,
    D: tl.constexpr, DV: tl.constexpr, BN: tl.constexpr,
    QUANTIZED: tl.constexpr, CAPPED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to the candidates before `stop` by their scores; continues the running maxima and sums."""
    for first in tl.range(0, stop, BN, num_stages=STAGES):
        o_n = first + tl.arange(0, BN)
        m_n = o_n < N
        b_position = tl.load(p_position + o_n, mask=m_n, other=-1)
        b_evicted = tl.load(p_evicted + o_n, mask=m_n, other=-1)
        m_seen = (b_position[None, :] <= b_t[:, None]) & (b_evicted[None, :] >= b_t[:, None])
        m_seen = m_seen & (b_position >= 0)[None, :]
        b_s = _scores(
            b_q, _either(p_keys, D, p_new, k_t, o_n, S), _either(p_key_scale, 1, p_new_key_scale, 1, o_n, S),
            m_n, o_d, m_d, scale, softcap, QUANTIZED, CAPPED,
        )  # fmt: skip
        b_s = tl.where(m_seen, b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, axis=1))
        # Until a state was seen the maximum is -inf, and -inf - -inf is NaN.
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp(b_s - b_base[:, None])
        b_old = tl.exp(b_max - b_base)
        b_sum = b_sum * b_old + tl.sum(b_p, axis=1)
        p_v = _either(p_values, DV, p_new_value, v_t, o_n, S)
        b_v = tl.load(p_v[:, None] + o_v[None, :], mask=(b_position >= 0)[:, None] & m_v[None, :], other=0.0)
        if QUANTIZED:
            p_scale = _either(p_value_scale, 1, p_new_value_scale, 1, o_n, S)
            b_p *= tl.load(p_scale, mask=b_position >= 0, other=0.0).to(tl.float32)[None, :]
        b_o = b_o * b_old[:, None] + tl.dot(b_p.to(b_q.dtype), b_v.to(b_q.dtype), input_precision=EXACT)
        b_max = b_new
    return b_sum, b_o


@triton.jit
def _attend_weights(
    b_t, b_sum, b_o, p_weights, o_row, m_c, p_values, p_new_value, v_t, p_value_scale, p_new_value_scale,
    p_position, p_evicted, o_v, m_v, stop, N, S,
    DV: tl.constexpr, BN: tl.constexpr, QUANTIZED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Attend to the candidates before `stop` by the weights that the scan has used."""
    for first in range(0, stop, BN):
        o_n = first + tl.arange(0, BN)
        m_n = o_n < N
        b_position = tl.load(p_position + o_n, mask=m_n, other=-1)
        b_evicted = tl.load(p_evicted + o_n, mask=m_n, other=-1)
        m_seen = (b_position[None, :] <= b_t[:, None]) & (b_evicted[None, :] >= b_t[:, None])
        m_seen = m_seen & (b_position >= 0)[None, :]
        b_w = tl.load(p_weights + o_row[:, None] + o_n[None, :], mask=m_c[:, None], other=0.0)
        b_p = tl.where(m_seen, b_w * LOWERED, 0.0)
        b_sum += tl.sum(b_p, axis=1)
        # Empty slots are zero. A mask that has to be loaded first would delay the loads of values.
        p_v = _either(p_values, DV, p_new_value, v_t, o_n, S)
        b_v = tl.load(p_v[:, None] + o_v[None, :], mask=m_n[:, None] & m_v[None, :], other=0.0)
        if QUANTIZED:
            p_scale = _either(p_value_scale, 1, p_new_value_scale, 1, o_n, S)
            b_scale = tl.load(p_scale, mask=m_n, other=0.0).to(tl.float32)
            b_p = tl.where(m_seen, b_p * b_scale[None, :], 0.0)
        b_o += tl.dot(b_p.to(DTYPE), b_v.to(DTYPE), input_precision=EXACT)
    return b_sum, b_o


@triton.jit(do_not_specialize=["C", "S"])
def attend_kernel(
    query, key, value, new_key_scale, new_value_scale, keys, values, key_scale, value_scale,
    position, evicted_at, query_position, sinks, weights, sink_weights, output,
    scale, softcap, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, C, S,
    H: tl.constexpr, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    QUANTIZED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, WEIGHED: tl.constexpr,
):  # fmt: skip
    """Masked attention: the rows from a state's position to its eviction see the state.

    Where the weights of `weigh_kernel` are given, they are used. Where all that a row still sees has vanished beside
    what was evicted, its program computes scores instead.
    """
    i_b, i_h, i_c = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.program_id(0)
    scale, softcap = tl.cast(scale, tl.float32), tl.cast(softcap, tl.float32)
    i_k, i_g, N = i_h // (H // K), i_h // (H // G), S + C
    o_c, o_d, o_v = i_c * BC + tl.arange(0, BC), tl.arange(0, BD), tl.arange(0, BV)
    m_c, m_d, m_v = o_c < C, o_d < D, o_v < DV
    b_t = tl.load(query_position + i_b * C + o_c, mask=m_c, other=-1)
    b_sum = tl.zeros([BC], tl.float32)
    b_o = tl.zeros([BC, BV], tl.float32)
    o_slots, o_new, o_group = (i_b * K + i_k) * S, (i_b * K + i_k) * C, (i_b * G + i_g) * N
    p_value, stop = value + i_b * v_b + i_k * v_h, tl.max(tl.where(m_c, S + o_c + 1, 0))
    computes = True
    if WEIGHED:
        o_head = ((i_b * G + i_g) * ROWS + o_c) * (H // G) + i_h % (H // G)
        if SINKS:
            b_sum += tl.load(sink_weights + o_head, mask=m_c, other=0.0) * LOWERED
        b_sum, b_o = _attend_weights(
            b_t, b_sum, b_o, weights, o_head * WIDTH, m_c, values + o_slots * DV, p_value, v_t,
            value_scale + o_slots, new_value_scale + o_new, position + o_group, evicted_at + o_group, o_v, m_v, stop, N,
            S, DV, BN, QUANTIZED, query.dtype.element_ty,
        )  # fmt: skip
        computes = tl.max(((b_sum < VANISHED) & (b_t >= 0)).to(tl.int32)) > 0
    if computes:
        p_q = query + i_b * q_b + i_h * q_h
        b_q = tl.load(p_q + o_c[:, None] * q_t + o_d[None, :], mask=m_c[:, None] & m_d[None, :], other=0.0)
        b_max = tl.full([BC], float("-inf"), tl.float32)
        b_sum = tl.zeros([BC], tl.float32)
        b_o = tl.zeros([BC, BV], tl.float32)
        if SINKS:
            b_max = tl.zeros([BC], tl.float32) + tl.load(sinks + i_h)
            b_sum += 1.0
        b_sum, b_o = _attend_scores(
            b_q, b_t, b_max, b_sum, b_o, keys + o_slots * D, key + i_b * k_b + i_k * k_h, k_t,
            key_scale + o_slots, new_key_scale + o_new, values + o_slots * DV, p_value, v_t,
            value_scale + o_slots, new_value_scale + o_new, position + o_group, evicted_at + o_group,
            o_d, m_d, o_v, m_v, scale, softcap, stop, N, S, D, DV, BN, QUANTIZED, CAPPED,
            1 if WEIGHED or query.dtype.element_ty == tl.float32 else 2,
        )  # fmt: skip
    b_o = b_o / tl.where(b_sum == 0, 1.0, b_sum)[:, None]
    p_o = output + ((i_b * C + o_c[:, None]) * H + i_h) * DV + o_v[None, :]
    tl.store(p_o, b_o, mask=m_c[:, None] & m_v[None, :])


def _blocks(dim: int, dtype: torch.dtype) -> tuple[int, dict[str, int]]:
    """The rows of a program, and the block sizes of a launch."""
    candidates = at_once(MOST, dim, dtype)
    rows, stages = min(MOST, 2 * candidates), 1 if dtype == torch.float32 else 3
    return rows, {"BC": rows, "BN": candidates, "num_warps": 4, "num_stages": stages}


def prefill_triton(
    slots: Slots, query: Tensor, key: Tensor, value: Tensor, query_position: Tensor, scoring: Scoring
) -> Prefilled:
    (B, H, C, D), (K, DV), (_, G, S) = query.shape, (key.shape[1], value.shape[-1]), slots.position.shape
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    fresh = slots.quantize(key, value)
    key, value = (rows.codes for rows in fresh)
    position, importance, norm = slots.candidates(query_position, fresh[1])
    query_position = query_position.contiguous()
    sinks, softcap = scoring.sinks_of(1), scoring.softcap

    def or_placeholder(pointer: Tensor | None) -> Tensor:
        return pointer if pointer is not None else position  # no kernel reads the placeholder

    scales = [or_placeholder(s) for s in (fresh[0].scale, fresh[1].scale, slots.key_scale, slots.value_scale)]
    flags = {"QUANTIZED": slots.state_dtype is not None, "CAPPED": softcap is not None, "SINKS": sinks is not None}
    rows, blocks = _blocks(max(D, DV), query.dtype)
    grid, space = (triton.cdiv(C, rows), H, B), room(C, S + C)
    shape = {"H": H, "K": K, "G": G, "D": D, "DV": DV, "BD": width(D), "BV": width(DV)}
    shape |= {"ROWS": space.rows, "WIDTH": space.width}
    weights = sink_weights = None
    if slots.bound.policy.decay is not None:
        exact = partial(torch.empty, dtype=torch.float32, device=query.device)
        weights = exact(B, G, space.rows, H // G, space.width)
        sink_weights = exact(weights.shape[:4]) if sinks is not None else None
        new_values, values = (t.view(torch.int8) if slots.state_dtype else t for t in (value, slots.values))
        weigh_kernel[grid](
            query, key, new_values, scales[0], slots.keys, scales[2], values, position, query_position,
            or_placeholder(sinks), weights, or_placeholder(sink_weights), scoring.scale, softcap or 1.0,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], C, S, **shape, **flags, **blocks,
        )  # fmt: skip
    joint = [weights, sink_weights]
    if slots.joint is not None:
        joint = [None if part is None else slots.joint.gather(part, 3) for part in joint]
    evicted_at = scan_triton(joint[0], position, importance, query_position, slots.bound, joint[1], norm)
    output = torch.empty(B, C, H, DV, device=query.device, dtype=query.dtype)
    # Weights span more than the range of float16.
    weighed = weights is not None and query.dtype != torch.float16
    attend_kernel[grid](
        query, key, value, *scales[:2], slots.keys, slots.values, *scales[2:], position, evicted_at, query_position,
        or_placeholder(sinks), or_placeholder(weights), or_placeholder(sink_weights), output,
        scoring.scale, softcap or 1.0, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], C, S,
        WEIGHED=weighed, **shape, **flags, **blocks,
    )  # fmt: skip
    keep_triton(slots, *fresh, position, importance, norm, evicted_at)
    return Prefilled(output, position, evicted_at)
