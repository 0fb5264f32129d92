"""Read a long text into a state with checkpoints, so that an interrupted read can be resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from msrnn.checks import is_whole
from msrnn.core.shards import least
from msrnn.core.state import MultiState
from msrnn.core.state_file import load_description
from msrnn.errors import FileError, UsageError
from msrnn.hf.inputs import split_at_blocks
from msrnn.hf.rnn import MultiStateRNN

SECONDS = 30.0  # between checkpoints
PROTECT = "protect"  # the note of a checkpoint whose tokens are protected
RECALL = "recall_while_reading", "search", "archive_bytes"  # the notes of one whose tokens recall
SHARE = 20  # and at least this many times as long as saving one takes, so that saving costs at most 1/20


class LongRead:
    """Token ids [1, T] to read, and a checkpoint file: the state after the first `done` tokens.

    The file records a digest of the tokens read and of the file `start` that the read began from, and how tokens
    recall, so a checkpoint of another text, another start or another recall is refused. With `protect`, the tokens are
    never evicted.
    """

    def __init__(self, ids: Tensor, checkpoint: Path, start: Path | None = None, protect: bool = False) -> None:
        self.ids, self.checkpoint, self.protect, self.done = ids, checkpoint, protect, 0
        self.total = int(ids.shape[1])
        self._start = None if start is None else _digest(start.read_bytes())
        self._saved_at, self._save_seconds, self._failed = perf_counter(), 0.0, False

    def resume(self, rnn: MultiStateRNN) -> MultiState | None:
        """Load the checkpoint and set `done`; None if there is no checkpoint. Refuses one that does not fit."""
        if not self.checkpoint.exists():
            return None
        try:
            state, done = rnn.load_state(self.checkpoint), self._tokens_in_checkpoint(rnn)
            if self._start is None and int(state.seen[0]) != done:
                raise UsageError(f"it records {done:,} tokens, but its state has read {int(state.seen[0]):,}")
        except FileError as error:
            raise UsageError(error.problem) from error  # the caller names the file
        self.done = done
        return state

    def _tokens_in_checkpoint(self, rnn: MultiStateRNN) -> int:
        """How many tokens the checkpoint has read, if this text begins with them and `rnn` reads as it did."""
        notes = load_description(self.checkpoint).get("notes")
        done = notes.get("read") if isinstance(notes, dict) else None
        if not isinstance(notes, dict) or not is_whole(done) or done < 1:
            raise UsageError("it does not record what was read")
        if done > self.total:
            raise UsageError(f"it has read {done:,} tokens, more than the {self.total:,} to read")
        expected = self.notes(done, rnn)
        if notes.get(PROTECT) != expected.get(PROTECT):
            raise UsageError(f"its tokens are {'not ' if self.protect else ''}protected")
        for name in RECALL:
            if (found := notes.get(name)) != expected.get(name):
                raise UsageError(f"its tokens were read with {name} {found!r:.40}, not {expected.get(name)!r}")
        if notes != expected:
            same_start = notes.get("begun") == self._start
            raise UsageError("it is of another text" if same_start else "it began from another state")
        return done

    def notes(self, done: int, rnn: MultiStateRNN) -> dict[str, Any]:
        """The notes that a checkpoint has in addition to the state."""
        found = {"read": done, "text": _digest(self.ids[0, :done].numpy().tobytes()), "begun": self._start}
        return {**found, **({PROTECT: True} if self.protect else {}), **_describe_recall(rnn)}

    def check_protect(self, rnn: MultiStateRNN, state: MultiState) -> None:
        """Refuse to protect more tokens than fit, before any is read."""
        rnn.spec.check_protect()
        state.find_ranges(torch.tensor([self.total - self.done]))

    def run(
        self,
        rnn: MultiStateRNN,
        state: MultiState,
        on_tokens: Callable[[int], object],
        on_failure: Callable[[Exception], object],
    ) -> None:
        """Read the tokens after the first `done`, saving checkpoints; `done` counts on.

        `on_tokens` gets the number of tokens of each block after it is read, and may raise to stop. `on_failure` is
        called once if a checkpoint cannot be saved: reading continues without checkpoints.
        """

        def on_block(columns: int) -> None:
            self.done += columns
            on_tokens(columns)
            shards = rnn.spec.model.shards
            if least(self._is_due(), shards, rnn.device):  # processes that share a model save together
                self._save(rnn, state, on_failure)

        if self.done == self.total:
            return
        left, every = self.ids[:, self.done :], rnn.recall_while_reading
        if not self.protect:
            rnn.read(left, state, last_only=True, on_block=on_block, recall_every=every)
            return
        self.check_protect(rnn, state)
        for piece in split_at_blocks(left, int(state.seen), every or 1, rnn.block):
            # One call for each: a checkpoint must not protect tokens that are not read yet.
            rnn.read(piece, state, last_only=True, protect=True, recall_every=every)
            on_block(piece.shape[1])

    def _is_due(self) -> bool:
        return not self._failed and perf_counter() - self._saved_at >= max(SECONDS, SHARE * self._save_seconds)

    def _save(self, rnn: MultiStateRNN, state: MultiState, on_failure: Callable[[Exception], object]) -> None:
        started = perf_counter()
        try:
            state.save(self.checkpoint, self.notes(self.done, rnn))
        except (OSError, UsageError) as error:
            self._failed = True
            on_failure(error)
        self._saved_at = perf_counter()
        self._save_seconds = self._saved_at - started


def _describe_recall(rnn: MultiStateRNN) -> dict[str, Any]:
    """The options that decide which rows tokens recall, and that no fingerprint has; none if they recall none."""
    found = rnn.prompt_recall
    if found is None or found.while_reading is None:
        return {}
    return dict(zip(RECALL, (found.while_reading, found.recall.search, found.recall.limit), strict=True))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
