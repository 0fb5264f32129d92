"""MultiState: the KV cache of a whole model as a value: save, load, fork, select, cat."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msrnn.checks import check_count
from msrnn.core.device_memory import check_fits
from msrnn.core.fingerprint import find_difference
from msrnn.core.layer_files import restore_layers, save_layers
from msrnn.core.own_sizes import check_own_size, group_by_fewer, lower_bound, make_fewer
from msrnn.core.paged_slots import PagedSlots
from msrnn.core.protection import add_ranges, forget_unread
from msrnn.core.protection import check_fits as check_protected_fit
from msrnn.core.recall_slots import RecallSlots
from msrnn.core.shards import Shards, least
from msrnn.core.slots import MOST_COLUMNS, Memory, Slots, ordinary_tensors
from msrnn.core.state_file import load_tensors
from msrnn.errors import FileError, UsageError


@dataclass(eq=False, repr=False)
class MultiState:
    """The state of a whole model: the KV cache rows of each layer, at the model's own layer indices."""

    layers: list[Any]
    fingerprint: dict[str, Any]
    columns: int  # read so far, padding included: the same number for all layers and sequences
    whole: bool = True  # False after a forward pass that was interrupted: the state is then unusable

    def __repr__(self) -> str:
        policy, size, seen = self.fingerprint.get("policy"), self.fingerprint.get("size"), self.seen.tolist()
        return (
            f"MultiState(policy={policy!r}, size={size}, batch_size={len(seen)}, seen={seen}, nbytes={self.nbytes:,})"
        )

    def _own(self) -> Iterator[tuple[int, Memory]]:
        return ((i, layer) for i, layer in enumerate(self.layers) if isinstance(layer, Memory))

    @property
    def batch_size(self) -> int:
        return next(layer for _, layer in self._own()).batch_size

    @property
    def seen(self) -> Tensor:
        """Tokens read so far, per sequence: [B], a copy. Padding does not count."""
        return next(layer for _, layer in self._own()).seen.clone()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers; those of this process, if several share the model."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def nbytes_in_all(self) -> int:
        """Bytes of the buffers of all processes that share the model."""
        return self.nbytes if self._shards is None else self.nbytes * self._shards.count

    @property
    def archive_nbytes(self) -> int:
        """Bytes of the archived rows, those of this process; forks count what they share, each."""
        seen = self.seen.tolist()
        return sum(layer.archive_nbytes(seen) for _, layer in self._own())

    @property
    def dropped_tokens(self) -> list[int]:
        """The tokens of each sequence, its first ones, whose archived rows are dropped: the archive has a limit."""
        begins = [
            [archive.begin for archive in layer.archives] for layer in self.layers if isinstance(layer, RecallSlots)
        ]
        return [max(found) for found in zip(*begins, strict=True)] if begins else [0] * self.batch_size

    @property
    def _shards(self) -> Shards | None:
        """The processes that share the model, if there are several."""
        return next((layer.shards for _, layer in self._own() if layer.shards), None)

    def reset(self) -> None:
        """Make the state empty; the buffers stay where they are."""
        for layer in self.layers:
            layer.reset()
        self.columns, self.whole = 0, True

    def check_room(self, columns: int) -> None:
        """Refuse columns whose positions do not fit into 32 bits."""
        if self.columns + columns > MOST_COLUMNS:
            raise UsageError(
                f"{self.columns + columns:,} columns: a state reads {MOST_COLUMNS:,} at most; "
                "continue from an empty one"
            )

    def begin_read(self, columns: int) -> None:
        """Begin a forward pass over new columns. Until it ends, the state is unusable."""
        self.check_room(columns)
        self.whole = False
        self.prepare_layers(columns)

    def prepare_layers(self, columns: int) -> None:
        """Prepare all layers for a forward pass over new columns, where rows are archived."""
        for _, layer in self._own():
            layer.begin_read(columns)

    def reserve(self, columns: int) -> int:
        """Make room in the archives for the next columns -> the segments that kernels search; 0: no kernels do."""
        paged = [layer for layer in self.layers if isinstance(layer, PagedSlots)]
        for layer in paged:
            layer.reserve(columns)
        return paged[0].segments if paged else 0

    def end_read(self, columns: int) -> None:
        """End the forward pass over these columns. All layers have read them, and only now they count."""
        self.columns, self.whole = self.columns + columns, True

    @contextmanager
    def reading(self, columns: int) -> Iterator[None]:
        """A forward pass over new columns. If it does not end normally, the state stays unusable."""
        self.begin_read(columns)
        yield
        self.end_read(columns)

    @property
    def protected(self) -> list[list[tuple[int, int]]]:
        """The ranges [begin, end) of positions of each sequence whose tokens are not evicted until `release`."""
        layers = self._slot_layers()
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
            for layer in self._slot_layers():
                layer.protected.copy_(forget_unread(layer.protected, layer.seen))

    def find_ranges(self, counts: Tensor) -> Tensor | None:
        """The protected ranges with the next `counts` [B] tokens of each sequence; None: nothing is ever evicted."""
        layers = self._slot_layers()
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
        for layer in self._slot_layers():
            layer.protected.zero_()

    def limit_size(self, size: int) -> None:
        """Let the sequences of this empty state hold at most `size` KV rows in each layer, fewer than it has room for.

        They are then read as by a model of that size. A size that the layers cannot have is refused.
        """
        if self.columns:
            raise UsageError("only an empty state takes it", name="size", value=size, advice="make another state")
        check_own_size([layer.bound if isinstance(layer, Slots) else None for _, layer in self._own()], size)
        for layer in self._slot_layers():
            layer.fewer.copy_(make_fewer(layer.bound, [size]).expand_as(layer.fewer))

    def _set_ranges(self, ranges: Tensor | None) -> None:
        if ranges is not None:
            for layer in self._slot_layers():
                layer.protected.copy_(ranges)

    def _slot_layers(self) -> list[Slots]:
        return [layer for _, layer in self._own() if isinstance(layer, Slots)]

    def advance(self, real: Tensor) -> Tensor:
        """The positions [B, T] int32 of the next columns, -1 where `real` is False; counts their tokens in every layer.

        `Memory.advance` for all layers at once, where all are on one device: as few kernels as possible. Launches
        kernels only, so that a captured graph repeats it; `reading` counts the columns.
        """
        memories = [layer for _, layer in self._own()]
        counted = memories[0].seen[:, None] + real.cumsum(-1)
        position = (counted - 1).to(torch.int32).masked_fill(~real, -1)
        torch._foreach_copy_([memory.seen for memory in memories], [counted[:, -1].contiguous()] * len(memories))
        return position

    def positions(self, layer: int) -> Tensor:
        """Positions of the tokens that a layer holds: [B, G, size + 1], -1 where a slot is empty; a copy."""
        own = dict(self._own())
        if layer not in own:
            raise UsageError(f"must be one of {sorted(own)}, the layers that hold KV rows", name="layer", value=layer)
        return own[layer].position.clone()

    def check_fits(self, fingerprint: dict[str, Any]) -> None:
        """Refuse a state of another model, policy, size, dtype or positions than the fingerprint's."""
        if difference := find_difference(self.fingerprint, fingerprint):
            raise UsageError(f"the state was made {difference}")
        self.check_whole()

    def check_whole(self) -> None:
        """Refuse a state whose forward pass was interrupted: some layers have read more than others."""
        if not self.whole:
            raise UsageError(
                "this state was interrupted inside a forward pass and is unusable: continue from a saved or forked one"
            )

    def select(self, sequences: Sequence[int] | Tensor) -> MultiState:
        """A new state with these sequences of the batch; the old one is untouched."""
        index = self.sequence_index(sequences)
        self._check_memory(len(index))
        return self._with([layer.select(index) for layer in self.layers])

    def _with(self, layers: list[Any]) -> MultiState:
        """A state that has read the same columns, with other layers."""
        return replace(self, layers=layers)

    def sequence_index(self, numbers: Sequence[int] | Tensor) -> Tensor:
        """Numbers of sequences as an index [N]; refuses those that this state does not have."""
        index = torch.as_tensor(numbers)
        if index.ndim != 1 or index.numel() == 0 or index.is_floating_point() or index.dtype == torch.bool:
            raise UsageError("must be a non-empty list of numbers of sequences", name="sequences", value=numbers)
        if int(index.min()) < 0 or int(index.max()) >= self.batch_size:
            raise UsageError(
                f"must be from 0 to {self.batch_size - 1}, the sequences of this state",
                name="sequences",
                value=index.tolist(),
            )
        return index

    def fork(self, copies: int) -> MultiState:
        """A new state with every sequence `copies` times, copies of one side by side; the old one is untouched."""
        check_count("copies", copies)
        self._check_memory(self.batch_size * copies)
        return self.select(each(self.batch_size, copies))

    @classmethod
    def cat(cls, states: Sequence[MultiState]) -> MultiState:
        """A new state with the sequences of several, in order; the old ones are untouched. They must be of one kind."""
        if not states or not all(isinstance(state, MultiState) for state in states):
            raise UsageError(f"cat({states!r:.80}): must be a list of states, 1 or more")
        first = states[0]
        for state in states:
            state.check_fits(first.fingerprint)
        dtypes = {layer.dtype for state in states for _, layer in state._own()}
        if len(dtypes) > 1:
            raise UsageError(
                f"cat: states of models in {', '.join(sorted(map(str, dtypes)))}; they must compute in one"
            )
        if any([type(layer) for layer in state.layers] != [type(layer) for layer in first.layers] for state in states):
            raise UsageError(
                "cat: the archives of these states are searched in different ways; convert_state them first"
            )
        first._check_memory(sum(state.batch_size for state in states))
        groups = [first._savable(), *(state._savable() for state in states[1:])]
        columns = max(state.columns for state in states)
        layers = [layer.cat([group[i][1] for group in groups], columns) for i, (_, layer) in enumerate(groups[0])]
        return cls(layers, first.fingerprint, columns)

    @property
    def device(self) -> torch.device:
        """The device of its first layer."""
        return next(layer for _, layer in self._own()).seen.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MultiState:
        """A copy on another device, all layers together; a model reads states on its own device only.

        With `non_blocking`, a copy between a GPU and the host is only begun, as in torch: it is there when the GPU has
        done what it was given before.
        """
        return self._with([layer.to(torch.device(device), non_blocking) for _, layer in self._savable()])

    def cpu(self) -> MultiState:
        """A copy on the CPU, to keep a conversation that is not needed now."""
        return self.to("cpu")

    def _check_memory(self, count: int) -> None:
        one = self.nbytes // self.batch_size
        what = f"a state of {count:,} sequences"
        check_fits(one * count, self.device, what, lambda free: f"{free // one:,} sequences fit")

    def become(self, other: MultiState, sequences: Tensor) -> None:
        """Take over the values of `other.select(sequences)`, in the buffers that are here already."""
        self.columns, self.whole = other.columns, other.whole
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            for name, buffer in mine.tensors().items():
                buffer.copy_(getattr(theirs, name)[sequences.to(buffer.device)])
            mine.take_archives(range(len(sequences)), theirs, sequences.tolist())

    def view(self, sequences: slice) -> MultiState:
        """A view of some sequences: the buffers are the same."""
        return self._with([layer.view(sequences) for layer in self.layers])

    def copy_sequence(self, index: int, columns: int) -> MultiState:
        """A copy of one sequence that has read `columns` columns; `select` without a check that waits for the device.

        Slots of a decode batch are written one by one, so the columns of the batch are not those of a sequence.
        """
        layers = [layer.copy(slice(index, index + 1)) for layer in self.layers]
        return MultiState(layers, self.fingerprint, columns)

    @ordinary_tensors
    def set_sequence(self, index: int, other: MultiState, source: int = 0) -> None:
        """Overwrite a sequence by one of another state, or of this one, in place; `columns` stays as it is."""

        def tensors(state: MultiState, number: int) -> list[Tensor]:
            return [tensor[number] for layer in state.layers for tensor in layer.tensors().values()]

        torch._foreach_copy_(tensors(self, index), tensors(other, source))
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.take_archives([index], theirs, [source])

    @ordinary_tensors
    def clear_archive(self, index: int) -> None:
        """Forget the archived rows of a sequence that is no longer read."""
        for _, layer in self._own():
            layer.clear_archive(index)

    def save(
        self, path: str | os.PathLike[str], notes: dict[str, Any] | None = None, segments_apart: bool = False
    ) -> None:
        """Write the state to one safetensors file, whole or not at all; `notes` are kept in its description.

        With `segments_apart`, the whole segments of archives are files of their own, in the folder NAME.archive next to
        the file NAME.safetensors, and only those that are new are written. The two belong together.

        Numbers that are not finite are refused, since such a state could not be loaded again. Where several processes
        share the model, all of them must call this: the first one writes the heads of all, and the file fits any number
        of processes.
        """
        shards, error = self._shards, None
        writes = shards is None or shards.rank == 0
        whole = self.gather_heads(archives=writes)
        if writes:
            try:
                self.check_whole()
                layers = whole._savable()
                save_layers(Path(path), layers, self.columns, self.fingerprint, notes or {}, segments_apart)
            except Exception as raised:  # the other processes wait
                error = raised
        saved = least(int(error is None), shards, self.device)
        if error is not None:
            raise error
        if not saved:
            raise FileError("not saved", path, advice="the first process says why")

    def gather_heads(self, archives: bool = True) -> MultiState:
        """Gather the heads of all processes: the state as one process alone would have it. All must call it.

        Archives are then in main memory. A process that does not need them has empty ones without `archives`.
        """
        return self._with([layer.gather_heads(archives) for _, layer in self._savable()])

    def _divide_like(self, other: MultiState) -> MultiState:
        """The heads of this process, of a state that has all of them."""
        pairs = zip(self._savable(), other._savable(), strict=True)
        return self._with([mine.divide(theirs) for (_, mine), (_, theirs) in pairs])

    @classmethod
    def load_fitting(
        cls, path: str | os.PathLike[str], fingerprint: dict[str, Any], empty: Callable[[int], MultiState]
    ) -> MultiState:
        """Read a state that was saved with the same fingerprint; `empty` makes one of a given batch size.

        Everything that kernels rely on is checked, so that no file can make one write outside of its buffers.
        """
        tensors, description = load_tensors(Path(path))
        if difference := find_difference(description, fingerprint):
            raise FileError(f"was saved {difference}", path)
        own = empty(1)  # the file's batch size is not trusted until its tensors agree
        state = own.gather_heads()
        try:
            state.columns = restore_layers(state._savable(), tensors, description, Path(path))
            return state if own._shards is None else state._divide_like(own)
        except FileError:  # it names the file at fault
            raise
        except ValueError as error:
            raise FileError(f"not a usable state, {error}", path, advice="use a copy, or make it again") from error

    def _savable(self) -> list[tuple[int, Memory]]:
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, Memory):
                raise UsageError(
                    f"layer {index} has linear attention, whose state cannot be saved, moved or joined; "
                    "fork or select it instead"
                )
        return list(self._own())


def each(count: int, copies: int) -> Tensor:
    """Indices of sequences, each repeated `copies` times: 0, 0, 1, 1, … for two copies."""
    return torch.arange(count).repeat_interleave(copies)
