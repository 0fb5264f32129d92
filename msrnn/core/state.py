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
from msrnn.core.mark import Mark, check_markable
from msrnn.core.shards import least
from msrnn.core.slots import MOST_COLUMNS, Memory, ordinary_tensors
from msrnn.core.state_file import load_tensors
from msrnn.core.state_layers import StateLayers
from msrnn.errors import FileError, UsageError


@dataclass(eq=False, repr=False)
class MultiState(StateLayers):
    """The state of a whole model, as a value."""

    whole: bool = True  # False after a forward pass that was interrupted: the state is then unusable
    marked: Mark | None = None  # the place that `rewind` can go back to

    def __repr__(self) -> str:
        policy, size, seen = self.fingerprint.get("policy"), self.fingerprint.get("size"), self.seen.tolist()
        return (
            f"MultiState(policy={policy!r}, size={size}, batch_size={len(seen)}, seen={seen}, nbytes={self.nbytes:,})"
        )

    def reset(self) -> None:
        """Make the state empty; the buffers stay where they are, and sequences keep sizes of their own."""
        own_sizes = [layer.fewer.clone() for layer in self.slot_layers()]
        for layer in self.layers:
            layer.reset()
        for layer, fewer in zip(self.slot_layers(), own_sizes, strict=True):
            layer.fewer.copy_(fewer)
        self.columns, self.whole, self.marked = 0, True, None

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

    def end_read(self, columns: int) -> None:
        """End the forward pass over these columns. All layers have read them, and only now they count."""
        self.columns, self.whole = self.columns + columns, True

    @contextmanager
    def reading(self, columns: int) -> Iterator[None]:
        """A forward pass over new columns. If it does not end normally, the state stays unusable."""
        self.begin_read(columns)
        yield
        self.end_read(columns)

    def mark(self, after: int = 0) -> None:
        """From now on, `rewind` can take back the tokens that are read, until `unmark`.

        It takes memory: a copy of the state's buffers, and queries, keys and values of the tokens that follow. Marking
        again moves the mark, and copies have none. The first `after` columns of the next forward pass are read before
        the mark.
        """
        self.check_whole()
        if self.marked is None:
            check_markable(self)
            check_fits(
                self.nbytes, self.device, "a mark", lambda free: f"it needs the bytes of the state, {self.nbytes:,}"
            )
            self.marked = Mark(self, after)
        else:
            self.marked.move(self, after)

    def rewind(self, tokens: int | Sequence[int]) -> None:
        """Take back the last tokens, or the last of each sequence, as if they had never been read.

        As many as were read since the mark; what they evicted is back. Processes that share the model must all call it.
        """
        self.check_whole()
        counts = [tokens] * self.batch_size if isinstance(tokens, int) else list(tokens)
        if len(counts) != self.batch_size:
            raise UsageError(f"must have a number for each of {self.batch_size} sequences", name="tokens", value=tokens)
        for count in counts:
            check_count("tokens", count, least=0)
        if self.marked is None:
            raise UsageError("this state has no mark: call mark() before the tokens that may be taken back")
        self.marked.check(self, counts)
        if not any(counts):
            return
        self.whole = False  # until all layers are back
        self.columns = self.marked.rewind(self, counts)
        self.whole = True

    def unmark(self) -> None:
        """Free what the mark keeps."""
        self.marked = None

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
        """A state that has read the same columns, with other layers and without a mark."""
        return replace(self, layers=layers, marked=None)

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
        dtypes = {layer.dtype for state in states for _, layer in state.own_layers()}
        if len(dtypes) > 1:
            raise UsageError(
                f"cat: states of models in {', '.join(sorted(map(str, dtypes)))}; they must compute in one"
            )
        if any(
            [one.kind for _, one in state.own_layers()] != [one.kind for _, one in first.own_layers()]
            for state in states
        ):
            raise UsageError(
                "cat: the archives of these states are searched in different ways, or have different limits; "
                "convert_state them first"
            )
        first._check_memory(sum(state.batch_size for state in states))
        groups = [first._savable(), *(state._savable() for state in states[1:])]
        columns = max(state.columns for state in states)
        layers = [layer.cat([group[i][1] for group in groups], columns) for i, (_, layer) in enumerate(groups[0])]
        return cls(layers, first.fingerprint, columns)

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
        self.columns, self.whole, self.marked = other.columns, other.whole, None
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

        self.marked = None
        torch._foreach_copy_(tensors(self, index), tensors(other, source))
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.take_archives([index], theirs, [source])

    def gather(self, others: Sequence[MultiState], columns: int) -> None:
        """Overwrite the first sequences by those of other states of one sequence each, in place.

        It has then read `columns`, as far as limits are concerned.
        """
        for other in others:
            other.check_whole()
        for row, other in enumerate(others):
            self.set_sequence(row, other)
        self.columns, self.whole = columns, True

    @ordinary_tensors
    def clear_archive(self, index: int) -> None:
        """Forget the archived rows of a sequence that is no longer read."""
        for _, layer in self.own_layers():
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
        shards, error = self.shards, None
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
            return state if own.shards is None else state._divide_like(own)
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
        return list(self.own_layers())


def each(count: int, copies: int) -> Tensor:
    """Indices of sequences, each repeated `copies` times: 0, 0, 1, 1, … for two copies."""
    return torch.arange(count).repeat_interleave(copies)
