"""A decode step of some sequences of the slots, for backends without a kernel for it: they are copied out and back."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from msrnn.core.scores import Scoring
from msrnn.core.slots import Slots


class DecodesCopies:
    decode: Any  # the backend's own

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
        chosen: Slots = slots.select(sequences)
        chosen.forget(query_position == 0)
        output: Tensor = self.decode(chosen, query, key, value, query_position, scoring)
        slots.put(sequences, chosen)
        return output
