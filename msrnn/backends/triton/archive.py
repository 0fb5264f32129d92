"""Archived rows on a GPU: kernels that write those of new tokens, and that fetch guests.

Rows are in pinned memory of the host, or on the device. Kernels find them by the addresses of their segments, in
`table` [B, SEGMENTS, 3]. Nothing is read back, so a captured graph can be replayed until there are more segments than
it ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from msrnn.backends.triton.common import LEAST, width
from msrnn.backends.triton.copied_keys import (
    FIELDS,
    INDEX,
    INDEX_SCALE,
    ROWS,
    SEGMENT,
    index_types,
    locate,
)
from msrnn.backends.triton.quantization import quantize
from msrnn.backends.triton.selection import STAYS
from msrnn.core.paged_slots import PagedSlots

WRITERS = 8  # programs that archive many tokens: more would only wait for the bus, where matrix products could run
READERS = 32  # programs that fetch guests


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


@triton.jit(do_not_specialize=["before", "heads"])
def gather_kernel(
    places, table, guest_keys, guest_values, guest_position, before, heads,
    K: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, MOST: tl.constexpr, COUNT: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Copy archived rows to the places of guests of some KV heads; -1 is none, and STAYS changes nothing.

    It is the translation of addresses that is slow, not the bytes. So few programs take rows that are near each other
    at the same time: those of the same places of all heads. Rows that come in are in the order of their positions.
    """
    o_w, o_near = tl.arange(0, width(D + DV)), tl.arange(0, BT)
    parts = tl.cdiv(heads, BH)
    for item in tl.range(tl.program_id(0), parts * tl.cdiv(COUNT, BT // BH), tl.num_programs(0), num_stages=1):
        o_head, o_g = item % parts * BH + o_near % BH, item // parts * (BT // BH) + o_near // BH
        i_head = (before + o_head).to(tl.int64)
        o_guest = i_head * COUNT + o_g
        b_t = tl.load(places + o_guest, mask=(o_head < heads) & (o_g < COUNT), other=STAYS)
        m_t = b_t >= 0
        p_table = table + (i_head // K * MOST + b_t // SEGMENT) * FIELDS
        o_row = i_head % K * SEGMENT + b_t % SEGMENT
        p_rows = locate(p_table, ROWS, guest_keys, m_t)[:, None] + o_row[:, None] * (D + DV)
        b_row = tl.load(p_rows + o_w[None, :], mask=m_t[:, None] & (o_w < D + DV)[None, :], other=0.0)
        p_k, m_k = guest_keys + o_guest[:, None] * D + o_w[None, :], o_w < D
        p_v, m_v = guest_values + o_guest[:, None] * DV + (o_w - D)[None, :], (o_w >= D) & (o_w < D + DV)
        tl.store(p_k, b_row, mask=m_t[:, None] & m_k[None, :])
        tl.store(p_v, b_row, mask=m_t[:, None] & m_v[None, :])
        tl.store(guest_position + o_guest, b_t, mask=b_t != STAYS)


def archive_triton(slots: PagedSlots, key: Tensor, value: Tensor, position: Tensor) -> None:
    """Append the rows [B, K, T, D] of tokens at positions [B, T], -1 where padding, to their archives."""
    (B, K, T, D), DV = key.shape, value.shape[-1]
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    archive_kernel[(B * K if T <= LEAST else WRITERS,)](
        key, value, position.contiguous(), slots.table, slots.guest_keys, *index_types(slots),
        *key.stride()[:3], *value.stride()[:3], B * K, T,
        K=K, D=D, DV=DV, MOST=slots.table.shape[1], BT=LEAST, num_warps=4,
    )  # fmt: skip


def gather_triton(slots: PagedSlots, places: Tensor, part: slice) -> None:
    """Fetch the guests of some of the B * K heads, to where `places` [B, K, n] has them."""
    (_, K, count, D), DV = slots.guest_keys.shape, slots.guest_values.shape[-1]
    heads = part.stop - part.start
    gather_kernel[(READERS,)](
        places, slots.table, slots.guest_keys, slots.guest_values, slots.guest_position, part.start, heads,
        K=K, D=D, DV=DV, MOST=slots.table.shape[1], COUNT=count, BT=LEAST,
        BH=min(LEAST, triton.next_power_of_2(heads)), num_warps=4,
    )  # fmt: skip
