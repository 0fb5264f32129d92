"""Recall on a GPU, for all sequences of a batch: kernels that archive rows, gather guests and attend to them.

Archived rows are in pinned memory of the host, or on the device. Kernels find them by the addresses of their segments,
in `table` [B, SEGMENTS, 3]. Nothing is read back, so a captured graph can be replayed until there are more segments
than it ranks. `core/guests.py` defines it; `search.py` and `selection.py` choose the guests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from msrnn import recall
from msrnn.backends.triton.common import LEAST, at_once, cap_scores, width
from msrnn.backends.triton.quantization import quantize
from msrnn.backends.triton.search import FIELDS, index_types, locate, search_triton
from msrnn.backends.triton.selection import STAYS
from msrnn.core import paged_slots
from msrnn.core.guests import Attention
from msrnn.core.paged_slots import PagedSlots
from msrnn.core.scores import Scoring

SEGMENT = tl.constexpr(recall.SEGMENT)
ROWS, INDEX = tl.constexpr(paged_slots.ROWS), tl.constexpr(paged_slots.INDEX)
INDEX_SCALE = tl.constexpr(paged_slots.INDEX_SCALE)
GUESTS = 64  # at once
WRITERS = 32  # programs that archive many tokens: more would only wait for the bus, where others could compute


@triton.jit(do_not_specialize=["heads", "T"])
def archive_kernel(
    key, value, position, table, rows, index, scales, k_b, k_h, k_t, v_b, v_h, v_t, heads, T,
    K: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, MOST: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Write the rows of some tokens to their segments; `rows` to `scales` are pointers of the types of their fields."""
    o_d, o_v = tl.arange(0, width(D)), tl.arange(0, width(DV))
    for item in tl.range(tl.program_id(0), heads * tl.cdiv(T, BT), tl.num_programs(0), num_stages=1):
        i_b, i_k = (item % heads // K).to(tl.int64), item % K
        o_t = item // heads * BT + tl.arange(0, BT)
        b_t = tl.load(position + i_b * T + o_t, mask=o_t < T, other=-1)
        m_t = b_t >= 0
        m_k, m_v = m_t[:, None] & (o_d < D)[None, :], m_t[:, None] & (o_v < DV)[None, :]
        b_k = tl.load(key + i_b * k_b + i_k * k_h + o_t[:, None] * k_t + o_d[None, :], mask=m_k, other=0.0)
        b_v = tl.load(value + i_b * v_b + i_k * v_h + o_t[:, None] * v_t + o_v[None, :], mask=m_v, other=0.0)
        p_table = table + (i_b * MOST + b_t // SEGMENT) * FIELDS
        o_row = i_k * SEGMENT + b_t % SEGMENT
        p_rows = locate(p_table, ROWS, rows, m_t)[:, None] + o_row[:, None] * (D + DV)
        p_index, p_scales = locate(p_table, INDEX, index, m_t), locate(p_table, INDEX_SCALE, scales, m_t)
        b_codes, b_scale = quantize(b_k, 127.0, True)
        tl.store(p_index[:, None] + (o_row[:, None] * D + o_d[None, :]), b_codes.to(tl.int8), mask=m_k)
        tl.store(p_scales[:, None] + o_row[:, None], b_scale.to(tl.bfloat16), mask=m_t[:, None])
        tl.store(p_rows + o_d[None, :], b_k, mask=m_k)
        tl.store(p_rows + (D + o_v)[None, :], b_v, mask=m_v)


@triton.jit
def gather_kernel(
    places, table, guest_keys, guest_values, guest_position,
    K: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, MOST: tl.constexpr, COUNT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Copy archived rows to the places of guests; -1 is none, and STAYS changes nothing."""
    i_head = tl.program_id(0).to(tl.int64)
    i_b, i_k = i_head // K, i_head % K
    o_g, o_d, o_v = tl.program_id(1) * BT + tl.arange(0, BT), tl.arange(0, width(D)), tl.arange(0, width(DV))
    b_t = tl.load(places + i_head * COUNT + o_g, mask=o_g < COUNT, other=STAYS)
    m_t = b_t >= 0
    o_guest, o_row = i_head * COUNT + o_g, i_k * SEGMENT + b_t % SEGMENT
    p_table = table + (i_b * MOST + b_t // SEGMENT) * FIELDS
    p_rows = locate(p_table, ROWS, guest_keys, m_t)[:, None] + o_row[:, None] * (D + DV)
    m_k, m_v = m_t[:, None] & (o_d < D)[None, :], m_t[:, None] & (o_v < DV)[None, :]
    b_k = tl.load(p_rows + o_d[None, :], mask=m_k, other=0.0)
    b_v = tl.load(p_rows + (D + o_v)[None, :], mask=m_v, other=0.0)
    tl.store(guest_position + o_guest, b_t, mask=b_t != STAYS)
    tl.store(guest_keys + o_guest[:, None] * D + o_d[None, :], b_k, mask=m_k)
    tl.store(guest_values + o_guest[:, None] * DV + o_v[None, :], b_v, mask=m_v)


@triton.jit(do_not_specialize=["T", "window"])
def guest_kernel(
    query, guest_keys, guest_values, guest_position, position, log_sums, output, scale, softcap, window, T,
    K: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, Q: tl.constexpr, COUNT: tl.constexpr,
    BQ: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """Attention of a part of the Q queries of a KV head to its guests alone. softcap and window may be None."""
    PRECISION: tl.constexpr = "ieee" if query.dtype.element_ty == tl.float32 else "tf32"
    i_head = tl.program_id(0).to(tl.int64)
    o_q, o_d, o_v = tl.program_id(1) * BQ + tl.arange(0, BQ), tl.arange(0, width(D)), tl.arange(0, width(DV))
    m_q, i_q = o_q < Q, i_head * Q + o_q
    scale = tl.cast(scale, tl.float32)
    b_q = tl.load(query + i_q[:, None] * D + o_d[None, :], mask=m_q[:, None] & (o_d < D)[None, :], other=0.0)
    b_t = tl.load(position + i_head // K * T + o_q % T, mask=m_q, other=-1)
    b_max, b_sum = tl.full([BQ], float("-inf"), tl.float32), tl.zeros([BQ], tl.float32)
    b_o = tl.zeros([BQ, width(DV)], tl.float32)
    for start in range(0, COUNT, BG):
        o_g = start + tl.arange(0, BG)
        m_g, i_g = o_g < COUNT, i_head * COUNT + o_g
        b_at = tl.load(guest_position + i_g, mask=m_g, other=-1)
        b_k = tl.load(guest_keys + i_g[:, None] * D + o_d[None, :], mask=m_g[:, None] & (o_d < D)[None, :], other=0.0)
        b_v = tl.load(
            guest_values + i_g[:, None] * DV + o_v[None, :], mask=m_g[:, None] & (o_v < DV)[None, :], other=0.0
        )
        b_s = cap_scores(tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale, softcap)
        m_seen = (b_at >= 0)[None, :] & (b_t >= 0)[:, None]
        if window is not None:
            m_seen = m_seen & (b_at[None, :] > b_t[:, None] - window)
        b_s = tl.where(m_seen, b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, axis=1))
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)  # -inf - -inf is NaN
        b_p, b_old = tl.exp(b_s - b_base[:, None]), tl.exp(b_max - b_base)
        b_sum = b_sum * b_old + tl.sum(b_p, axis=1)
        b_o = b_o * b_old[:, None] + tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
        b_max = b_new
    b_total = tl.where(b_sum == 0.0, 1.0, b_sum)
    tl.store(log_sums + i_q, b_max + tl.log(b_total), mask=m_q)
    tl.store(output + i_q[:, None] * DV + o_v[None, :], b_o / b_total[:, None], mask=m_q[:, None] & (o_v < DV)[None, :])


@triton.jit
def add_kernel(output, share, guests, T, H: tl.constexpr, DV: tl.constexpr):
    """Add the guests' part of a query's attention to its output."""
    i_b, i_t, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    o_v = tl.arange(0, width(DV))
    i_query, p_output = (i_b * H + i_h) * T + i_t, output + ((i_b * T + i_t) * H + i_h) * DV + o_v
    b_o = tl.load(p_output, mask=o_v < DV).to(tl.float32)
    b_guests = tl.load(guests + i_query * DV + o_v, mask=o_v < DV)
    tl.store(p_output, b_o + tl.load(share + i_query) * b_guests, mask=o_v < DV)


def archive_triton(slots: PagedSlots, key: Tensor, value: Tensor, position: Tensor) -> None:
    """Append the rows [B, K, T, D] of tokens at positions [B, T], -1 where padding, to their archives."""
    (B, K, T, D), DV = key.shape, value.shape[-1]
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    archive_kernel[(B * K if T <= LEAST else WRITERS,)](
        key, value, position.contiguous(), slots.table, slots.guest_keys, *index_types(slots),
        *key.stride()[:3], *value.stride()[:3], B * K, T,
        K=K, D=D, DV=DV, MOST=slots.table.shape[1], BT=LEAST, num_warps=4,
    )  # fmt: skip


def recall_triton(slots: PagedSlots, query: Tensor, key: Tensor, position: Tensor, scoring: Scoring) -> None:
    """Let a block of tokens of each sequence recall its guests.

    query [B, H, T, D], key [B, K, T, D], position [B, T]
    """
    (B, K, count, D), DV = slots.guest_keys.shape, slots.guest_values.shape[-1]
    key = key if key.stride(-1) == 1 else key.contiguous()
    places = search_triton(slots, query.contiguous(), key, position.contiguous(), scoring)
    gather_kernel[(B * K, triton.cdiv(count, LEAST))](
        places, slots.table, slots.guest_keys, slots.guest_values, slots.guest_position,
        K=K, D=D, DV=DV, MOST=slots.table.shape[1], COUNT=count, BT=LEAST, num_warps=4,
    )  # fmt: skip


def attend_guests_triton(slots: PagedSlots, query: Tensor, position: Tensor, scoring: Scoring) -> Attention:
    """`attend_guests` by one kernel."""
    (B, H, T, D), (_, K, count, DV), bound = query.shape, slots.guest_values.shape, slots.bound
    Q = H // K * T
    log_sum = torch.empty(B, H, T, dtype=torch.float32, device=query.device)
    output = torch.empty(B, H, T, DV, dtype=torch.float32, device=query.device)
    rows = min(GUESTS, max(LEAST, triton.next_power_of_2(Q)))
    guest_kernel[(B * K, triton.cdiv(Q, rows))](
        query.contiguous(), slots.guest_keys, slots.guest_values, slots.guest_position, position.contiguous(),
        log_sum, output, scoring.scale, scoring.softcap, bound.window if bound.sliding else None, T,
        K=K, D=D, DV=DV, Q=Q, COUNT=count, BQ=rows, BG=at_once(GUESTS, max(D, DV), query.dtype),
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return Attention(log_sum, output)


def add_guests_triton(output: Tensor, share: Tensor, guests: Tensor) -> Tensor:
    """output [B, T, H, Dv] + share [B, H, T] * guests [B, H, T, Dv], by one kernel, in place if it can be."""
    B, T, H, DV = output.shape
    output = output.contiguous()
    add_kernel[(B, T, H)](output, share.contiguous(), guests, T, H=H, DV=DV, num_warps=1)
    return output
