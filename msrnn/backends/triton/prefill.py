"""Prefill of one chunk of a layer on a GPU: weights for the scan, the scan, masked attention, and filling free slots.

`TorchBackend.prefill` is the reference. Keys and values are read from the slots and from the new tokens without
copying; masks come from positions and eviction times. Index names as in `decode.py`.
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


@triton.jit
def _scores(
    b_q, p_keys, k_t, p_scale, o_n, m_n, o_d, m_d, scale, softcap, QUANTIZED: tl.constexpr, CAPPED: tl.constexpr
):
    """Scores [BC, BN] of queries [BC, BD] with one block of keys."""
    b_k = tl.load(p_keys + o_n[:, None] * k_t + o_d[None, :], mask=m_n[:, None] & m_d[None, :], other=0.0)
    b_s = tl.dot(b_q, tl.trans(b_k.to(b_q.dtype)), input_precision=EXACT) * scale
    if QUANTIZED:
        b_s *= tl.load(p_scale + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    if CAPPED:
        b_s = softcap * (1.0 - 2.0 / (tl.exp(2.0 * b_s / softcap) + 1.0))
    return b_s


@triton.jit
def _weigh(
    b_q, b_t, b_max, p_keys, k_t, p_scale, p_position, p_weights, o_row, o_d, m_d, scale, softcap,
    N, SPAN: tl.constexpr, BN: tl.constexpr, QUANTIZED: tl.constexpr, CAPPED: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    """The maxima of the scores over N more candidates, at most SPAN; once these are known, the weights."""
    for start in range(0, SPAN, BN):
        o_n = start + tl.arange(0, BN)
        m_n = o_n < N
        b_position = tl.load(p_position + o_n, mask=m_n, other=-1)
        m_seen = (b_position >= 0)[None, :] & (b_position[None, :] <= b_t[:, None])
        b_s = _scores(b_q, p_keys, k_t, p_scale, o_n, m_n, o_d, m_d, scale, softcap, QUANTIZED, CAPPED)
        b_s = tl.where(m_seen, b_s, float("-inf"))
        if STORES:
            b_w = lifted_exp(b_s - b_max[:, None])
            tl.store(p_weights + o_row[:, None] + o_n[None, :], b_w, mask=(o_row >= 0)[:, None] & m_n[None, :])
        else:
            b_max = tl.maximum(b_max, tl.max(b_s, axis=1))
    return b_max


@triton.jit(do_not_specialize=["C"])
def weigh_kernel(
    query, key, new_key_scale, keys, key_scale, position, query_position, sinks, weights, sink_weights,
    scale, softcap, q_b, q_h, q_t, k_b, k_h, k_t, C,
    S: tl.constexpr, H: tl.constexpr, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    QUANTIZED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Each head's exponentials over all candidates that a row could see without evictions, relative to their maximum.
    They are scaled up, so that kept tokens may score up to 147 below a maximum that is evicted."""
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
    b_max = tl.full([BC], float("-inf"), tl.float32)
    if SINKS:
        b_max = tl.zeros([BC], tl.float32) + tl.load(sinks + i_h)
    b_max = _weigh(
        b_q, b_t, b_max, p_slots, D, p_scale, p_position, weights, o_row, o_d, m_d, scale, softcap,
        S, S, BN, QUANTIZED, CAPPED, False,
    )  # fmt: skip
    b_max = _weigh(
        b_q, b_t, b_max, p_new, k_t, p_new_scale, p_position + S, weights, o_row, o_d, m_d, scale, softcap,
        C, SPAN, BN, QUANTIZED, CAPPED, False,
    )  # fmt: skip
    b_max = tl.where(b_max == float("-inf"), 0.0, b_max)
    _weigh(
        b_q, b_t, b_max, p_slots, D, p_scale, p_position, weights, o_row, o_d, m_d, scale, softcap,
        S, S, BN, QUANTIZED, CAPPED, True,
    )  # fmt: skip
    _weigh(
        b_q, b_t, b_max, p_new, k_t, p_new_scale, p_position + S, weights + S, o_row, o_d, m_d, scale, softcap,
        C, SPAN, BN, QUANTIZED, CAPPED, True,
    )  # fmt: skip
    if SINKS:
        tl.store(sink_weights + o_head, lifted_exp(tl.load(sinks + i_h) - b_max), mask=m_c)


@triton.jit
def _attend(
    b_q, b_t, b_max, b_sum, b_o, p_keys, k_t, p_key_scale, p_values, v_t, p_value_scale, p_position, p_evicted,
    o_d, m_d, o_v, m_v, scale, softcap,
    N, SPAN: tl.constexpr, BN: tl.constexpr, QUANTIZED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Attend to N more candidates, at most SPAN, where a row sees them; continues the running sums."""
    for start in range(0, SPAN, BN):
        o_n = start + tl.arange(0, BN)
        m_n = o_n < N
        b_position = tl.load(p_position + o_n, mask=m_n, other=-1)
        b_evicted = tl.load(p_evicted + o_n, mask=m_n, other=-1)
        m_seen = (b_position[None, :] <= b_t[:, None]) & (b_evicted[None, :] >= b_t[:, None])
        m_seen = m_seen & (b_position >= 0)[None, :]
        b_s = _scores(b_q, p_keys, k_t, p_key_scale, o_n, m_n, o_d, m_d, scale, softcap, QUANTIZED, CAPPED)
        b_s = tl.where(m_seen, b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, axis=1))
        # Until a state was seen the maximum is -inf, and -inf - -inf is NaN.
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp(b_s - b_base[:, None])
        b_old = tl.exp(b_max - b_base)
        b_sum = b_sum * b_old + tl.sum(b_p, axis=1)
        m_held = (b_position >= 0)[:, None] & m_v[None, :]
        b_v = tl.load(p_values + o_n[:, None] * v_t + o_v[None, :], mask=m_held, other=0.0)
        if QUANTIZED:
            b_p *= tl.load(p_value_scale + o_n, mask=b_position >= 0, other=0.0).to(tl.float32)[None, :]
        b_o = b_o * b_old[:, None] + tl.dot(b_p.to(b_q.dtype), b_v.to(b_q.dtype), input_precision=EXACT)
        b_max = b_new
    return b_max, b_sum, b_o


@triton.jit(do_not_specialize=["C"])
def attend_kernel(
    query, key, value, new_key_scale, new_value_scale, keys, values, key_scale, value_scale,
    position, evicted_at, query_position, sinks, output,
    scale, softcap, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, C,
    S: tl.constexpr, H: tl.constexpr, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    SPAN: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    QUANTIZED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Masked attention: the rows from a state's position to its eviction see the state."""
    i_b, i_h, i_c = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.program_id(0)
    scale, softcap = tl.cast(scale, tl.float32), tl.cast(softcap, tl.float32)
    i_k, i_g, N = i_h // (H // K), i_h // (H // G), S + C
    o_c, o_d, o_v = i_c * BC + tl.arange(0, BC), tl.arange(0, BD), tl.arange(0, BV)
    m_c, m_d, m_v = o_c < C, o_d < D, o_v < DV
    p_q = query + i_b * q_b + i_h * q_h
    b_q = tl.load(p_q + o_c[:, None] * q_t + o_d[None, :], mask=m_c[:, None] & m_d[None, :], other=0.0)
    b_t = tl.load(query_position + i_b * C + o_c, mask=m_c, other=-1)
    b_max = tl.full([BC], float("-inf"), tl.float32)
    b_sum = tl.zeros([BC], tl.float32)
    if SINKS:
        b_max = tl.zeros([BC], tl.float32) + tl.load(sinks + i_h)
        b_sum += 1.0
    b_o = tl.zeros([BC, BV], tl.float32)
    o_slots, o_new, o_group = (i_b * K + i_k) * S, (i_b * K + i_k) * C, (i_b * G + i_g) * N
    b_max, b_sum, b_o = _attend(
        b_q, b_t, b_max, b_sum, b_o, keys + o_slots * D, D, key_scale + o_slots, values + o_slots * DV, DV,
        value_scale + o_slots, position + o_group, evicted_at + o_group,
        o_d, m_d, o_v, m_v, scale, softcap, S, S, BN, QUANTIZED, CAPPED,
    )  # fmt: skip
    b_max, b_sum, b_o = _attend(
        b_q, b_t, b_max, b_sum, b_o, key + i_b * k_b + i_k * k_h, k_t, new_key_scale + o_new,
        value + i_b * v_b + i_k * v_h, v_t, new_value_scale + o_new, position + o_group + S, evicted_at + o_group + S,
        o_d, m_d, o_v, m_v, scale, softcap, C, SPAN, BN, QUANTIZED, CAPPED,
    )  # fmt: skip
    b_o = b_o / tl.where(b_sum == 0, 1.0, b_sum)[:, None]
    p_o = output + ((i_b * C + o_c[:, None]) * H + i_h) * DV + o_v[None, :]
    tl.store(p_o, b_o, mask=m_c[:, None] & m_v[None, :])


def _blocks(C: int, dim: int, dtype: torch.dtype) -> tuple[int, dict[str, int]]:
    """The rows of a program, and the block sizes of a launch."""
    candidates = at_once(MOST, dim, dtype)
    rows, stages = min(MOST, 2 * candidates), 1 if dtype == torch.float32 else 2
    span = triton.cdiv(C, candidates) * candidates
    return rows, {"SPAN": span, "BC": rows, "BN": candidates, "num_warps": 4, "num_stages": stages}


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
    rows, blocks = _blocks(C, max(D, DV), query.dtype)
    grid = triton.cdiv(C, rows), H, B
    shape = {"S": S, "H": H, "K": K, "G": G, "D": D, "BD": width(D)}
    weights = sink_weights = None
    if slots.bound.policy.decay is not None:
        space = room(C, S + C)
        exact = partial(torch.empty, dtype=torch.float32, device=query.device)
        weights = exact(B, G, space.rows, H // G, space.width)
        sink_weights = exact(weights.shape[:4]) if sinks is not None else None
        weigh_kernel[grid](
            query, key, scales[0], slots.keys, scales[2], position, query_position, or_placeholder(sinks), weights,
            or_placeholder(sink_weights), scoring.scale, softcap or 1.0, *query.stride()[:3], *key.stride()[:3], C,
            ROWS=space.rows, WIDTH=space.width, **shape, **flags, **blocks,
        )  # fmt: skip
    evicted_at = scan_triton(weights, position, importance, query_position, slots.bound, sink_weights, norm)
    output = torch.empty(B, C, H, DV, device=query.device, dtype=query.dtype)
    attend_kernel[grid](
        query, key, value, *scales[:2], slots.keys, slots.values, *scales[2:],
        position, evicted_at, query_position, or_placeholder(sinks), output,
        scoring.scale, softcap or 1.0, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], C,
        DV=DV, BV=width(DV), **shape, **flags, **blocks,
    )  # fmt: skip
    keep_triton(slots, *fresh, position, importance, norm, evicted_at)
    return Prefilled(output, position, evicted_at)
