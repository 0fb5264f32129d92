"""The interface of a backend, which computes one layer. Shapes are documented here, and not in each implementation.

Dimensions, here and in every kernel: B sequences of a batch, H query heads, K KV heads, G groups of heads that evict
together, M query heads of a group, R query heads that share a KV head, C new tokens, S slots, N candidates (slots, then
new tokens), D and Dv dimensions of a key and of a value.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from msrnn.bound import Bound
from msrnn.core.rope import Spacing
from msrnn.core.scores import Scoring
from msrnn.core.slots import Slots


class Prefilled(NamedTuple):
    output: Tensor  # [B, C, H, Dv]
    position: Tensor  # [B, G, N] int32 of the candidates (slots, then new tokens), -1 where there is none
    evicted_at: Tensor  # [B, G, N] int32: the last step that saw the candidate, or HELD


class Backend(Protocol):
    """Append, attend, observe and evict. Both methods update the slots in place; padding changes no held row.

    `share`, where it is given, is filled with the part of each query's attention that its sink has taken: 0 without
    sinks and for padding. A caller can so let queries attend to rows of its own: the log-sum-exp of their scores is the
    sink, and share times their softmax is their attention. Sinks are not observed.
    """

    name: str
    default_chunk: int  # tokens that are scored at once inside a layer
    decodes_repositioned: bool  # whether re-rotated keys are read token by token, since there is no faster prefill

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
        """Read C tokens, in order.

        query           [B, H, C, D]
        key, value      [B, K, C, D], [B, K, C, Dv]
        query_position  [B, C] int32, -1 for padding
        share           [B, H, C] float32, with any strides
        """
        ...

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
        """Read one token: a decode step.

        query           [B, K, R, D]
        key, value      [B, K, D], [B, K, Dv]
        query_position  [B] int32, -1 for padding
        share           [B, K, R] float32, a view of [B, H] with any strides
        returns         [B, K, R, Dv]
        """
        ...

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
        """`decode` of a batch that is some of the slots' sequences: sequences [B] int64, on the slots' device.

        Padding may name one sequence again and again, but none that a token of the batch belongs to. A token at
        position 0 begins a sequence: what the slots have held is another one's, and is forgotten.
        """
        ...

    def check_gaps(self, spacing: Spacing, bound: Bound, columns: int) -> None:
        """Refuse a text of `columns` columns if this backend cannot compute the gaps between its kept tokens."""
        ...
