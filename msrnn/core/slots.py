"""The buffers of a bounded layer: a fixed number of slots.

This module does not know attention: a backend decides which token is evicted.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from msrnn.bound import Bound
from msrnn.core.buffers import HELD as HELD
from msrnn.core.buffers import MOST_COLUMNS as MOST_COLUMNS
from msrnn.core.buffers import Buffers
from msrnn.core.buffers import LayerShape as LayerShape
from msrnn.core.buffers import ordinary_tensors as ordinary_tensors
from msrnn.core.growing import Growing as Growing
from msrnn.core.own_sizes import lower_bound, no_fewer
from msrnn.core.protection import RANGES, no_ranges
from msrnn.core.quantization import SCALE_DTYPE, Rows, quantize
from msrnn.core.row_weights import compute_norms, draw_weights
from msrnn.core.shards import Shards
from msrnn.errors import UsageError
from msrnn.policy import RANDOM


class Slots(Buffers):
    """The fixed buffers of a bounded layer. Keys are rotated when written, so the order of slots means nothing."""

    @ordinary_tensors
    def __init__(self, batch_size: int, shape: LayerShape, bound: Bound) -> None:
        super().__init__(batch_size, shape, bound.slots, bound.groups(shape.kv_heads))
        self.bound = bound
        self.state_dtype = shape.state_dtype
        self.protected = no_ranges(batch_size, shape.device)  # [B, RANGES, 2] int32: positions that are not evicted
        self.fewer = no_fewer(batch_size, shape.device)  # [B, 2] int32: see `msrnn.core.own_sizes`
        remembers = bool(bound.policy.decay)  # otherwise only the newest query, or the position, decides
        zeros = partial(torch.zeros, self.position.shape, dtype=torch.float32, device=shape.device)
        self.importance = zeros() if remembers else None
        self.row_weight = zeros() if bound.policy.weighs else None  # see `msrnn.core.row_weights`
        self.layer, self.network = shape.layer, shape.network
        if bound.policy.learned and shape.network is None:
            raise UsageError(f"policy {bound.policy.name!r}: its file is read when a model is wrapped")
        rows = self.keys.shape[:3]
        self.key_scale, self.value_scale = (
            torch.ones(rows, dtype=SCALE_DTYPE, device=shape.device) if shape.state_dtype else None for _ in range(2)
        )

    def head_tensors(self) -> set[str]:
        names = super().head_tensors() | {"key_scale", "value_scale"}
        return names | {"position", "importance", "row_weight"} if self.bound.policy.per == "head" else names

    @property
    def ranges(self) -> Tensor | None:
        """The protected ranges that a backend spares [B, RANGES, 2]; None where the layer's window does not."""
        return self.protected if self.bound.protects else None

    def bound_of(self, sequence: int) -> Bound:
        """The bound of one sequence, which may be lower than the layer's."""
        return lower_bound(self.bound, self.bound.size - int(self.fewer[sequence, 0]))

    @property
    def joint(self) -> Shards | None:
        """The processes that decide together what is evicted, where one group has the heads of all of them."""
        policy = self.bound.policy
        observes = policy.decay is not None or policy.value_norm  # learned weights have norms, too
        return self.shards if policy.per == "layer" and observes else None

    @property
    def first_group(self) -> int:
        """The first group of this process among those of all."""
        divided = self.shards is not None and self.bound.policy.per == "head"
        return self.shards.rank * self.position.shape[1] if divided and self.shards else 0

    @staticmethod
    def nbytes_of(batch_size: int, shape: LayerShape, bound: Bound) -> int:
        """The value that `nbytes` will have, computed without an allocation."""
        policy, itemsize = bound.policy, (shape.state_dtype or shape.dtype).itemsize
        row = shape.kv_heads * (shape.key_dim + shape.value_dim) * itemsize
        if shape.state_dtype:
            row += 2 * shape.kv_heads * SCALE_DTYPE.itemsize
        numbers = 1 + bool(policy.decay) + policy.weighs  # position, importance, weight: 4 bytes each
        row += bound.groups(shape.kv_heads) * numbers * 4
        return batch_size * (bound.slots * row + 8 + (RANGES + 1) * 2 * 4)

    def in_use(self, more: int) -> Slots:
        """A view of the slots up to the last held one, with room for `more` tokens.

        Tokens go into the first free slots, so the tokens of a state that is not full yet are in its first slots.
        """
        holds = (self.position >= 0).flatten(0, 1)
        if bool(holds.all(-1).any()):
            raise UsageError("this state has no free slot: read the text again, or load another state")
        held = holds.any(0).nonzero()
        count = (int(held[-1]) + 1 if len(held) else 0) + more + 1  # one slot always stays free
        if count >= self.position.shape[2]:
            return self
        whole = {id(tensor) for tensor in (self.seen, self.protected, self.fewer)}
        slots: Slots = self._with(lambda tensor: tensor if id(tensor) in whole else tensor[:, :, :count])
        return slots

    def quantize(self, key: Tensor, value: Tensor) -> tuple[Rows, Rows]:
        """New rows as these slots keep them: quantized if there is a `state_dtype`."""
        return quantize(key, self.state_dtype), quantize(value, self.state_dtype)

    def weigh(self, key: Rows, value: Rows, position: Tensor) -> Tensor | None:
        """The weights [B, G, C] float32 of rows [B, K, C, D] at position [B, 1 or G, C]; None: the policy has none."""
        policy, groups = self.bound.policy, self.position.shape[1]
        if policy.weights == RANDOM:
            return draw_weights(position, self.layer, range(self.first_group, self.first_group + groups))
        if policy.learned and self.network is not None:
            return self.network.weigh(key, value, position, groups, self.shards, self.joint)
        return compute_norms(value, groups, self.joint) if policy.value_norm else None

    def weigh_held(self) -> Tensor | None:
        """`weigh` of the held rows."""
        return self.weigh(Rows(self.keys, self.key_scale), Rows(self.values, self.value_scale), self.position)

    def candidates(self, query_position: Tensor, fresh: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Slots, then new tokens: position, importance and, where the policy has them, weights; all [B, G, S + C].

        query_position [B, C]; `fresh` [B, G, C] are the weights of the new rows
        """
        (B, G, S), C = self.position.shape, query_position.shape[1]
        position = torch.cat([self.position, query_position[:, None].expand(B, G, C)], dim=-1)
        importance = torch.zeros(position.shape, dtype=torch.float32, device=position.device)
        if self.importance is not None:
            importance[..., :S] = self.importance
        row_weight = None if self.row_weight is None or fresh is None else torch.cat([self.row_weight, fresh], dim=-1)
        return position, importance, row_weight

    def dequantized(self) -> tuple[Tensor, Tensor]:
        """Keys and values in the dtype that the model computes in."""
        return Rows(self.keys, self.key_scale).dequantized(self.dtype), Rows(self.values, self.value_scale).dequantized(
            self.dtype
        )

    def write(self, slot: Tensor, key: Rows, value: Rows, row_weight: Tensor | None) -> None:
        """Write rows [B, K, C, D] and their weights [B, G, C] into slot [B, G, C]."""
        if self.row_weight is not None and row_weight is not None:
            self.row_weight.scatter_(-1, slot, row_weight)
        for buffer, scales, fresh in ((self.keys, self.key_scale, key), (self.values, self.value_scale, value)):
            if scales is not None and fresh.scale is not None:
                scales.scatter_(2, slot.expand(fresh.scale.shape), fresh.scale)
            # Codes are moved as int8: not every 8-bit float can be scattered.
            into, rows = (t.view(torch.int8) if self.state_dtype else t for t in (buffer, fresh.codes))
            into.scatter_(2, slot[..., None].expand(rows.shape), rows)

    def keep(
        self, key: Rows, value: Rows, position: Tensor, importance: Tensor, row_weight: Tensor | None, held: Tensor
    ) -> None:
        """After a chunk: free the slots of evicted tokens, and move the new tokens that are still held into free slots.

        Rows [B, K, C, D]; position, importance, row_weight, held [B, G, S + C]: slots, then new tokens.
        """
        S = self.position.shape[-1]
        old, new = held[..., :S], held[..., S:]
        free = old.to(torch.int8).argsort(dim=-1, stable=True)
        # Evicted new tokens all go to the one slot that stays free: there are size + 1 slots.
        rank = torch.where(new, new.cumsum(-1) - 1, new.sum(-1, keepdim=True))
        slot = free.gather(-1, rank)
        self.position.masked_fill_(~old, -1)
        self.position.scatter_(-1, slot, position[..., S:].masked_fill(~new, -1))
        if self.importance is not None:
            self.importance.copy_(importance[..., :S])
            self.importance.scatter_(-1, slot, importance[..., S:])
        self.write(slot, key, value, None if row_weight is None else row_weight[..., S:])


Memory = Slots | Growing
