"""Recall on a GPU, for all sequences of a batch: a search fetches guests, and queries attend to them.

`core/guests.py` defines it; `search.py` chooses the guests, and `archive.py` fetches them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from msrnn.backends.triton.archive import gather_triton
from msrnn.backends.triton.common import LEAST, at_once, cap_scores, width
from msrnn.backends.triton.search import search_triton
from msrnn.core.guests import Attention
from msrnn.core.paged_slots import PagedSlots
from msrnn.core.scores import Scoring

GUESTS = 64  # at once


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


def recall_triton(slots: PagedSlots, query: Tensor, key: Tensor, position: Tensor, scoring: Scoring) -> None:
    """Let a block of tokens of each sequence recall its guests.

    query [B, H, T, D], key [B, K, T, D], position [B, T]
    """
    key, position = key if key.stride(-1) == 1 else key.contiguous(), position.contiguous()

    def fetch(places: Tensor, part: slice) -> None:
        gather_triton(slots, places, part)

    search_triton(slots, query.contiguous(), key, position, scoring, fetch)


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
