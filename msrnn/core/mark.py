"""A mark in a text: what a state reads after it can be taken back, exactly.

An eviction cannot be undone from what a state holds. So a mark copies its slots, and each layer keeps the queries, keys
and values of the tokens that follow. To go back, the copy is put back, and each layer attends once more to those tokens
that stay. That asks no model, and makes the decisions that were made before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from msrnn.core.buffers import ordinary_tensors
from msrnn.core.growing import Growing
from msrnn.core.protection import forget_unread
from msrnn.core.recall_slots import RecallSlots
from msrnn.core.slots import Slots
from msrnn.core.state_layers import StateLayers
from msrnn.errors import UsageError

UNCOPIED = ("protected", "fewer", "seen")  # reading does not change these tensors, or they are put back otherwise
Attend = Callable[[slice, Tensor], Tensor]  # attends to these columns of a forward pass, at positions [B, T]


@dataclass(frozen=True, eq=False)
class Pass:
    """Columns of a forward pass from `begin` on, as one layer has read them."""

    begin: int
    position: Tensor  # [B, T] int32, -1 where padding
    protected: Tensor  # the ranges of the layer at that time
    attend: Attend


def check_markable(state: StateLayers) -> None:
    """Refuse a state that cannot take tokens back."""
    for index, layer in enumerate(state.layers):
        if isinstance(layer, RecallSlots):
            raise UsageError("a state with an archive cannot take tokens back: use recall=0")
        if not isinstance(layer, Slots | Growing):
            raise UsageError(f"layer {index} has linear attention, which cannot take tokens back")


class Mark:
    """A place in the text of a state, and what its bounded layers have read since. Unbounded layers need no copy.

    The place is where the state is, or `after` this many columns of the next forward pass.
    """

    def __init__(self, state: StateLayers, after: int = 0) -> None:
        bounded = [i for i, layer in enumerate(state.layers) if isinstance(layer, Slots)]
        self._before: dict[int, dict[str, Tensor]] = {i: {} for i in bounded}
        self._passes: dict[int, list[Pass]] = {i: [] for i in bounded}
        self.move(state, after)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a state has no mark."""

    def move(self, state: StateLayers, after: int = 0) -> None:
        """Put the mark elsewhere, in the copies that are here already."""
        self.columns, self.after, self.seen = state.columns + after, after, state.seen.cpu()
        self._coming = set(self._passes) if after else set()  # layers that have not come to the mark
        self.clear()
        if not after:
            self.copy({index: state.layers[index] for index in self._passes})

    def clear(self) -> None:
        """Forget what the layers have read since the mark."""
        for passes in self._passes.values():
            passes.clear()

    @ordinary_tensors
    def copy(self, layers: Mapping[int, Slots]) -> None:
        """Copy what reading changes in the slots of these layers.

        Only kernels are launched, here and in `attend`, `leave_out` and `restore`: they can be captured as CUDA graphs.
        """
        copies, originals = list[Tensor](), list[Tensor]()
        for index, slots in layers.items():
            now = {name: tensor for name, tensor in slots.tensors().items() if name not in UNCOPIED}
            before = self._before[index] or {name: torch.empty_like(tensor) for name, tensor in now.items()}
            self._before[index] = before
            copies += before.values()
            originals += (now[name] for name in before)
        if copies:
            torch._foreach_copy_(copies, originals)

    def attend(self, index: int, slots: Slots, position: Tensor, attend: Attend) -> Tensor:
        """Let a layer attend to the columns of a forward pass, and keep what it takes to do so again."""
        begin, outputs = 0, []
        if index in self._coming:
            self._coming.remove(index)
            begin, before = self.after, position[:, : self.after]
            outputs.append(attend(slice(begin), before))
            self.seen = (slots.seen - (position >= 0).sum(1) + (before >= 0).sum(1)).cpu()
            self.copy({index: slots})
        rest = position[:, begin:]
        self._passes[index].append(Pass(begin, rest, slots.protected.clone(), attend))
        outputs.append(attend(slice(begin, None), rest))
        return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]

    def check(self, state: StateLayers, counts: Sequence[int]) -> None:
        """Refuse to take back more than was read, and a state that was read, or changed, behind the mark."""
        seen = state.seen.cpu()
        for count, most in zip(counts, (seen - self.seen).tolist(), strict=True):
            if count > most:
                advice = "mark() the state earlier"
                raise UsageError(f"{most} tokens were read since the mark", name="tokens", value=count, advice=advice)
        for passes in self._passes.values():
            columns = sum((part.position.shape[1] for part in passes), self.columns)
            tokens = sum(((part.position >= 0).sum(1).cpu() for part in passes), self.seen)
            if columns != state.columns or not torch.equal(tokens, seen):
                raise UsageError("this state was changed since its mark: mark() it again")

    @torch.no_grad()
    @ordinary_tensors
    def rewind(self, state: StateLayers, counts: Sequence[int]) -> int:
        """Take back the last `counts` tokens of the sequences -> the columns that the state then has read."""
        keep = state.seen - torch.tensor(counts, device=state.device)
        self.leave_out(keep)
        self._cut()
        columns = self._count_columns(state, keep)
        for layer in state.layers:
            if isinstance(layer, Growing):
                at = keep.to(layer.seen.device)
                layer.position.copy_(_before(at, layer.position[:, 0])[:, None])
                layer.padded |= bool((layer.position[:, 0, :columns] < 0).any())
                layer.seen.copy_(at)
        self.restore(state, keep)
        return columns

    def leave_out(self, keep: Tensor) -> None:
        """Let tokens from position `keep` [B] on be padding of the passes."""
        for index, passes in self._passes.items():
            self._passes[index] = [
                replace(part, position=_before(keep.to(part.position.device), part.position)) for part in passes
            ]

    def restore(self, state: StateLayers, keep: Tensor) -> None:
        """Put the bounded layers back, and let them read their passes again: the tokens before position `keep` [B]."""
        for index in self._passes:
            slots = state.layers[index]
            self._attend_again(index, slots)
            at = keep.to(slots.seen.device)
            slots.protected.copy_(forget_unread(slots.protected, at))
            slots.seen.copy_(at)

    def _cut(self) -> None:
        """Drop the columns of the passes after the last one with a token."""
        for parts in self._passes.values():
            while parts and (width := _count_used(parts[-1].position)) < parts[-1].position.shape[1]:
                last = parts.pop()
                if width:
                    parts.append(replace(last, position=last.position[:, :width].contiguous()))

    def _count_columns(self, state: StateLayers, keep: Tensor) -> int:
        """The columns up to the last one with a token before position `keep` [B]."""
        for passes in self._passes.values():
            return sum((part.position.shape[1] for part in passes), self.columns)
        growing: Growing = state.layers[0]
        return max(self.columns, _count_used(_before(keep, growing.position[:, 0, : state.columns])))

    def _attend_again(self, index: int, slots: Slots) -> None:
        before = self._before[index]
        torch._foreach_copy_([getattr(slots, name) for name in before], list(before.values()))
        protected = slots.protected.clone()
        for part in self._passes[index]:
            slots.protected.copy_(part.protected)
            part.attend(slice(part.begin, part.begin + part.position.shape[1]), part.position)
        slots.protected.copy_(protected)


def _before(keep: Tensor, position: Tensor) -> Tensor:
    """Positions [B, T], those from `keep` [B] on as padding."""
    return position.masked_fill(position >= keep[:, None], -1)


def _count_used(position: Tensor) -> int:
    """The columns of positions [B, T] up to the last one with a token."""
    used = (position >= 0).any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else 0
