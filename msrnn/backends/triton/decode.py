"""A decode step of one layer on a GPU: append and attend, then observe and evict, as two launches on the slots.

Where sequences and heads are too few to fill the GPU, the slots are split among programs, and a third launch combines
them. Nothing is read back, and shapes do not depend on the length, so a captured graph can be replayed at any length.
`TorchBackend.decode` is the reference; the kernels are in `attend.py` and `evict.py`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from msrnn.backends.triton.attend import attend_kernel, combine_kernel
from msrnn.backends.triton.common import at_once, sinks_and_share, strides_of
from msrnn.backends.triton.evict import EVICT_WARPS, evict_kernel, observe_kernel
from msrnn.backends.triton.rope import rotations_of
from msrnn.backends.triton.row_weight import grade_token, grade_written
from msrnn.backends.triton.streams import SideStreams
from msrnn.core.quantization import LARGEST
from msrnn.core.scores import Scoring
from msrnn.core.slots import Slots
from msrnn.errors import UsageError
from msrnn.policy import RANDOM


class Tile(NamedTuple):
    """What a program processes at once."""

    slots: int
    heads: int = 1  # with keys of their own, and the same rotations
    warps: int = 1
    stages: int = 3


PLAIN = Tile(32)
# Of 8-bit codes, where query heads share them; those of floats are loaded one block ahead only.
PAIRED_TILES = {torch.int8: Tile(32), torch.float8_e4m3fn: Tile(64, stages=2)}
ROTATED = Tile(8, heads=2)  # where a query head has keys of its own
ROTATED_GROUPED = Tile(16)  # where several share them
PROGRAMS = 4096  # fill the GPU, at one warp each


class Attended(NamedTuple):
    """What the eviction needs of a token's attention."""

    scores: Tensor  # [B, H, S], arbitrary for empty slots
    log_sums: Tensor  # [B, H]
    squares: Tensor | None  # [B, K]: squared norms of the token's values, where the policy ranks by norms
    fresh: Tensor  # [B, G] int32: the token's slot


def decode_triton(
    slots: Slots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_position: Tensor,
    scoring: Scoring,
    share: Tensor | None = None,
    sequences: Tensor | None = None,
) -> Tensor:
    """`Backend.decode`, or, with `sequences` [B] int64, `Backend.decode_chosen`."""
    if sequences is not None and (scoring.repositioning is not None or slots.state_dtype or slots.bound.policy.learned):
        reason = (
            "kernels step chosen sequences at original positions, of rows in the model's dtype, without learned weights"
        )
        raise UsageError(reason, advice="use backend torch")
    query, key, value, query_position = (t.contiguous() for t in (query, key, value, query_position))
    graded, side = None, SideStreams(query.device)
    if slots.bound.policy.learned and slots.state_dtype is None:
        with side.beside():
            graded = grade_token(slots, key, value, query_position)
    output, attended = _attend(slots, query, key, value, query_position, scoring, share, sequences)
    side.join()
    if slots.bound.policy.learned and graded is None:  # of quantized rows, as they were written
        graded = grade_written(slots, attended.fresh, query_position)
    _evict(slots, attended, query_position, graded, sequences)
    return output


def pairs_codes(query: Tensor, value_dim: int, code: torch.dtype | None) -> bool:
    """Whether `grouped_codes.py` attends: query heads [B, K, R, D] of 16 bits share 8-bit rows, original positions.

    Its factors are float16, which would be too coarse for queries of 32 bits.
    """
    R, D = query.shape[2:]
    return code is not None and R > 1 and D % 2 == value_dim % 2 == 0 and query.element_size() == 2


def _attend(
    slots: Slots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_position: Tensor,
    scoring: Scoring,
    share: Tensor | None,
    sequences: Tensor | None,
) -> tuple[Tensor, Attended]:
    """Write the new token's rows, and attend. Its position is written by the eviction."""
    (B, K, R, D), DV, (_, G, S) = query.shape, value.shape[-1], slots.position.shape
    bound, code, repositioning = slots.bound, slots.state_dtype, scoring.repositioning
    paired = repositioning is None and pairs_codes(query, DV, code)
    tile = PLAIN if repositioning is None else ROTATED if R == 1 else ROTATED_GROUPED
    if code is not None and paired:
        tile = PAIRED_TILES[code]
    heads = math.gcd(K // G, tile.heads) if code is None else 1
    block = tile.slots if R == 1 else at_once(tile.slots, max(D, DV), code if code and paired else query.dtype)
    splits = max(1, min(triton.cdiv(S, block), PROGRAMS * heads // (B * K)))
    span = triton.cdiv(S, splits * block) * block
    splits = triton.cdiv(S, span)

    exact = partial(torch.empty, dtype=torch.float32, device=query.device)
    fresh = torch.empty(B, G, device=query.device, dtype=torch.int32)
    squares = exact(B, K) if bound.policy.value_norm else None
    attended = Attended(exact(B, K * R, S), exact(B, K * R), squares, fresh)
    output = torch.empty(B, K, R, DV, device=query.device, dtype=query.dtype)
    maxima, sums, parts = attended.log_sums, None, output
    if splits > 1:
        maxima, sums, parts = exact(B, K * R, splits), exact(B, K * R, splits), exact(B, K * R, splits, DV)
    sinks, share = sinks_and_share(scoring, None if share is None else share.view(B, K * R, 1), B, 1)
    strides = (*strides_of(sinks)[:2], *strides_of(share)[:2])
    rotations, rotated = None, {"F": 0, "START": 0, "NEIGHBOURS": False}
    if repositioning is not None:
        rope = repositioning.rope
        rotations = rotations_of(slots, query_position, repositioning)
        rotated = {"F": len(rope.frequency), "START": rope.start, "NEIGHBOURS": rope.interleaved}
    attend_kernel[(B * (K // heads), splits)](
        query, key, value, slots.keys, slots.values, slots.key_scale, slots.value_scale, slots.position, query_position,
        sinks, share, rotations, fresh, attended.scores, maxima, sums, squares, parts, sequences, *strides,
        slots.ranges, scoring.scale, scoring.softcap, bound.window, bound.spared, LARGEST[code] if code else 1.0,
        SLIDING=bound.sliding, K=K, G=G, R=R, S=S, D=D, DV=DV, HEADS=heads, PAIRED=paired, BS=block, SPAN=span,
        **rotated, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(B * K * R,)](
            maxima, sums, parts, attended.log_sums, output, sinks, share, *strides,
            H=K * R, DV=DV, SPLITS=splits, num_warps=1,
        )  # fmt: skip
    return output, attended


def _evict(
    slots: Slots, attended: Attended, query_position: Tensor, graded: Tensor | None, sequences: Tensor | None
) -> None:
    """Weigh the new token's row, write its position, observe, and evict."""
    (B, H, S), G, K = attended.scores.shape, slots.position.shape[1], slots.keys.shape[1]
    policy, bound = slots.bound.policy, slots.bound
    scores, log_sums, squares, fresh = attended
    alpha = slots.network.on(scores.device).alpha if slots.network and policy.learned else None
    group = {"S": S, "M": H // G, "MEMBERS": K // G}
    observed, processes = None, 1
    if slots.joint is not None:
        observed = torch.empty(B, G, S + 2, dtype=torch.float32, device=scores.device)
        observes = policy.decay is not None
        observe_kernel[(B * G,)](
            scores if observes else None, log_sums, squares, graded, observed, **group, num_warps=EVICT_WARPS
        )
        slots.joint.sum(observed)
        processes = slots.joint.count
        group["M"] *= processes
    evict_kernel[(B, G)](
        fresh, scores, log_sums, slots.position, slots.importance, slots.row_weight, squares, graded, alpha,
        slots.layer if policy.weights == RANDOM else None, slots.first_group, query_position, observed, sequences,
        slots.ranges, slots.fewer, policy.decay, bound.size, policy.first, bound.recent, bound.window, bound.spared,
        G=G, **group, PROCESSES=processes, SLIDING=bound.sliding, num_warps=EVICT_WARPS,
    )  # fmt: skip
