"""What the layers of a state hold, all together: bytes, tokens read, positions, protected ranges, own sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from msrnn.core.own_sizes import check_own_size, group_by_fewer, lower_bound, make_fewer
from msrnn.core.paged_slots import PagedSlots
from msrnn.core.protection import add_ranges, forget_unread
from msrnn.core.protection import check_fits as check_protected_fit
from msrnn.core.recall_slots import RecallSlots
from msrnn.core.shards import Shards
from msrnn.core.slots import Memory, Slots
from msrnn.errors import UsageError


@dataclass(eq=False, repr=False)
class StateLayers:
    """The KV cache rows of each layer, at the model's own layer indices."""

    layers: list[Any]
    fingerprint: dict[str, Any]
    columns: int  # read so far, padding included: the same number for all layers and sequences

    def own_layers(self) -> Iterator[tuple[int, Memory]]:
        """The layers whose KV rows are msrnn's own, with their indices."""
        return ((i, layer) for i, layer in enumerate(self.layers) if isinstance(layer, Memory))

    @property
    def batch_size(self) -> int:
        return next(layer for _, layer in self.own_layers()).batch_size

    @property
    def seen(self) -> Tensor:
        """Tokens read so far, per sequence: [B], a copy. Padding does not count."""
        return next(layer for _, layer in self.own_layers()).seen.clone()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers; those of this process, if several share the model."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def nbytes_in_all(self) -> int:
        """Bytes of the buffers of all processes that share the model."""
        return self.nbytes if self.shards is None else self.nbytes * self.shards.count

    @property
    def archive_nbytes(self) -> int:
        """Bytes of the archived rows, those of this process; forks count what they share, each."""
        seen = self.seen.tolist()
        return sum(layer.archive_nbytes(seen) for _, layer in self.own_layers())

    @property
    def dropped_tokens(self) -> list[int]:
        """The tokens of each sequence, its first ones, whose archived rows are dropped: the archive has a limit."""
        begins = [
            [archive.begin for archive in layer.archives] for layer in self.layers if isinstance(layer, RecallSlots)
        ]
        return [max(found) for found in zip(*begins, strict=True)] if begins else [0] * self.batch_size

    @property
    def shards(self) -> Shards | None:
        """The processes that share the model, if there are several."""
        return next((layer.shards for _, layer in self.own_layers() if layer.shards), None)

    def prepare_layers(self, columns: int) -> None:
        """Prepare all layers for a forward pass over new columns, where rows are archived."""
        for _, layer in self.own_layers():
            layer.begin_read(columns)

    def reserve(self, columns: int) -> int:
        """Make room in the archives for the next columns -> the segments that kernels search; 0: no kernels do."""
        paged = [layer for layer in self.layers if isinstance(layer, PagedSlots)]
        for layer in paged:
            layer.reserve(columns)
        return paged[0].segments if paged else 0

    @property
    def protected(self) -> list[list[tuple[int, int]]]:
        """The ranges [begin, end) of positions of each sequence whose tokens are not evicted until `release`."""
        layers = self.slot_layers()
        ranges = layers[0].protected.tolist() if layers else [[] for _ in range(self.batch_size)]
        return [[(begin, end) for begin, end in own if begin < end] for own in ranges]

    @contextmanager
    def protecting(self, counts: Tensor) -> Iterator[None]:
        """Protect the next `counts` [B] tokens of each sequence, which are read meanwhile; refuses more than fit.

        Tokens that were not read, because of an error, are not protected.
        """
        self._set_ranges(self.find_ranges(counts))
        try:
            yield
        finally:
            for layer in self.slot_layers():
                layer.protected.copy_(forget_unread(layer.protected, layer.seen))

    def find_ranges(self, counts: Tensor) -> Tensor | None:
        """The protected ranges with the next `counts` [B] tokens of each sequence; None: nothing is ever evicted."""
        layers = self.slot_layers()
        if not layers:
            return None
        begin, counts = self.seen.cpu(), counts.cpu()
        ranges = add_ranges(layers[0].protected.cpu(), begin, begin + counts)
        for fewer, sequences in group_by_fewer(layer.fewer for layer in layers).items():
            bounds = [lower_bound(layer.bound, layer.bound.size - fewer) for layer in layers]
            check_protected_fit(ranges[sequences], bounds, counts[sequences])
        return ranges

    def release(self) -> None:
        """Protect no token any more: all may be evicted, as the policy says."""
        for layer in self.slot_layers():
            layer.protected.zero_()

    def limit_size(self, size: int) -> None:
        """Let the sequences of this empty state hold at most `size` KV rows in each layer, fewer than it has room for.

        They are then read as by a model of that size. A size that the layers cannot have is refused.
        """
        if self.columns:
            raise UsageError("only an empty state takes it", name="size", value=size, advice="make another state")
        check_own_size([layer.bound if isinstance(layer, Slots) else None for _, layer in self.own_layers()], size)
        for layer in self.slot_layers():
            layer.fewer.copy_(make_fewer(layer.bound, [size]).expand_as(layer.fewer))

    def _set_ranges(self, ranges: Tensor | None) -> None:
        if ranges is not None:
            for layer in self.slot_layers():
                layer.protected.copy_(ranges)

    def slot_layers(self) -> list[Slots]:
        """The bounded layers."""
        return [layer for _, layer in self.own_layers() if isinstance(layer, Slots)]

    def advance(self, real: Tensor) -> Tensor:
        """The positions [B, T] int32 of the next columns, -1 where `real` is False; counts their tokens in every layer.

        `Memory.advance` for all layers at once, where all are on one device: as few kernels as possible. Launches
        kernels only, so that a captured graph repeats it; `reading` counts the columns.
        """
        memories = [layer for _, layer in self.own_layers()]
        counted = memories[0].seen[:, None] + real.cumsum(-1)
        position = (counted - 1).to(torch.int32).masked_fill(~real, -1)
        torch._foreach_copy_([memory.seen for memory in memories], [counted[:, -1].contiguous()] * len(memories))
        return position

    def positions(self, layer: int) -> Tensor:
        """Positions of the tokens that a layer holds: [B, G, size + 1], -1 where a slot is empty; a copy."""
        own = dict(self.own_layers())
        if layer not in own:
            raise UsageError(f"must be one of {sorted(own)}, the layers that hold KV rows", name="layer", value=layer)
        return own[layer].position.clone()

    @property
    def device(self) -> torch.device:
        """The device of its first layer."""
        return next(layer for _, layer in self.own_layers()).seen.device
