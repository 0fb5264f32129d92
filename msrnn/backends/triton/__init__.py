"""Triton kernels on a GPU. Prefill with re-rotated keys has no kernel: there, plain torch is used."""

from __future__ import annotations

from torch import Tensor

from msrnn.backends.base import Prefilled
from msrnn.backends.torch import TorchBackend
from msrnn.backends.triton.decode import decode_triton
from msrnn.backends.triton.prefill import prefill_triton
from msrnn.backends.triton.rope import check_reach
from msrnn.bound import Bound
from msrnn.core.rope import Spacing
from msrnn.core.scores import Scoring
from msrnn.core.slots import Slots


class TritonBackend(TorchBackend):
    name = "triton"
    default_chunk = 192
    decodes_repositioned = True

    def prefill(
        self,
        slots: Slots,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_position: Tensor,
        scoring: Scoring,
        share: Tensor | None = None,
    ) -> Prefilled:
        if scoring.repositioning is None:
            return prefill_triton(slots, query, key, value, query_position, scoring, share)
        return super().prefill(slots, query, key, value, query_position, scoring, share)

    def decode(
        self,
        slots: Slots,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_position: Tensor,
        scoring: Scoring,
        share: Tensor | None = None,
    ) -> Tensor:
        return decode_triton(slots, query, key, value, query_position, scoring, share)

    def decode_chosen(
        self,
        slots: Slots,
        sequences: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_position: Tensor,
        scoring: Scoring,
    ) -> Tensor:
        return decode_triton(slots, query, key, value, query_position, scoring, sequences=sequences)

    def check_gaps(self, spacing: Spacing, bound: Bound, columns: int) -> None:
        check_reach(spacing, bound, columns)
