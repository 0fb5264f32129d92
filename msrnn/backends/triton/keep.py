"""After a chunk on a GPU: free the slots of evicted tokens and fill them; `Slots.keep` is the reference."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from msrnn.core.quantization import Rows
from msrnn.core.slots import HELD, Slots

FAR = tl.constexpr(HELD)
SLOTS_PER_BLOCK = 64


@triton.jit(do_not_specialize=["C", "S"])
def assign_kernel(
    position, evicted_at, importance, row_weight, slot_position, slot_importance, slot_weight, survivors, source, C, S,
    BS: tl.constexpr, BC: tl.constexpr, REMEMBERS: tl.constexpr, WEIGHS: tl.constexpr,
):  # fmt: skip
    """Free the slots of evicted tokens, and assign free slots, in order, to the new tokens that are still held.

    source [S]: the new token that goes into a slot, or -1; survivors [C] is scratch.
    """
    i, N = tl.program_id(0).to(tl.int64), S + C
    o_s, o_c = tl.arange(0, BS), tl.arange(0, BC)
    m_s, m_c = o_s < S, o_c < C
    p_old, p_new = i * N + o_s, i * N + S + o_c
    b_old = tl.load(position + p_old, mask=m_s, other=-1)
    m_held = (b_old >= 0) & (tl.load(evicted_at + p_old, mask=m_s, other=-1) == FAR)
    m_new = tl.load(position + p_new, mask=m_c, other=-1) >= 0
    m_new = m_new & (tl.load(evicted_at + p_new, mask=m_c, other=-1) == FAR)
    b_rank = tl.cumsum(m_new.to(tl.int32)) - 1
    tl.store(survivors + i * C + b_rank, o_c, mask=m_new)
    tl.debug_barrier()  # threads read what other threads wrote
    m_free = m_s & (m_held == 0)
    b_turn = tl.cumsum(m_free.to(tl.int32)) - 1
    m_taken = m_free & (b_turn < tl.sum(m_new.to(tl.int32)))
    b_source = tl.load(survivors + i * C + b_turn, mask=m_taken, other=-1)
    tl.store(source + i * S + o_s, b_source, mask=m_s)
    b_position = tl.load(position + i * N + S + b_source, mask=m_taken, other=-1)
    tl.store(slot_position + i * S + o_s, tl.where(m_held, b_old, b_position), mask=m_s)
    b_from = i * N + tl.where(m_taken, S + b_source, o_s)
    if WEIGHS:
        tl.store(slot_weight + i * S + o_s, tl.load(row_weight + b_from, mask=m_s, other=0.0), mask=m_s)
    if REMEMBERS:
        b_importance = tl.load(importance + b_from, mask=m_s, other=0.0)
        tl.store(slot_importance + i * S + o_s, b_importance, mask=m_s)


@triton.jit(do_not_specialize=["S"])
def move_kernel(
    fresh, slots, source, f_b, f_h, f_t, S,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Copy the rows of new tokens into the slots that `source` assigns."""
    i_b, i_k = tl.program_id(2).to(tl.int64), tl.program_id(1)
    o_s, o_d = tl.program_id(0) * BS + tl.arange(0, BS), tl.arange(0, BD)
    b_source = tl.load(source + (i_b * G + i_k * G // K) * S + o_s, mask=o_s < S, other=-1)
    m_rows = (b_source >= 0)[:, None] & (o_d < D)[None, :]
    p_fresh = fresh + i_b * f_b + i_k * f_h
    b_rows = tl.load(p_fresh + b_source[:, None] * f_t + o_d[None, :], mask=m_rows)
    tl.store(slots + ((i_b * K + i_k) * S + o_s[:, None]) * D + o_d[None, :], b_rows, mask=m_rows)


def keep_triton(
    slots: Slots,
    key: Rows,
    value: Rows,
    position: Tensor,
    importance: Tensor,
    row_weight: Tensor | None,
    evicted_at: Tensor,
) -> None:
    (B, G, S), C = slots.position.shape, key.codes.shape[2]
    source = torch.empty_like(slots.position)
    # Placeholders for what is not kept: no kernel reads these pointers.
    memory, slot_weight = (importance if kept is None else kept for kept in (slots.importance, slots.row_weight))
    assign_kernel[(B * G,)](
        position, evicted_at, importance, importance if row_weight is None else row_weight, slots.position, memory,
        slot_weight, torch.empty(B, G, C, dtype=torch.int32, device=source.device), source, C, S,
        BS=triton.next_power_of_2(S), BC=max(32, triton.next_power_of_2(C)),
        REMEMBERS=slots.importance is not None, WEIGHS=row_weight is not None,
    )  # fmt: skip
    for buffer, scales, fresh in ((slots.keys, slots.key_scale, key), (slots.values, slots.value_scale, value)):
        if scales is None or fresh.scale is None:
            _move(fresh.codes, buffer, source)
        else:
            _move(fresh.codes.view(torch.int8), buffer.view(torch.int8), source)
            _move(fresh.scale[..., None], scales[..., None], source)


def _move(fresh: Tensor, buffer: Tensor, source: Tensor) -> None:
    B, K, S, D = buffer.shape
    move_kernel[(triton.cdiv(S, SLOTS_PER_BLOCK), K, B)](
        fresh, buffer, source, *fresh.stride()[:3], S,
        K=K, G=source.shape[1], D=D, BS=SLOTS_PER_BLOCK, BD=triton.next_power_of_2(D),
    )  # fmt: skip
