"""Reading that can be stopped: a checkpoint beside the file to save to, and what goes on from it."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor

from msrnn.cli.saving import keep, partial_of
from msrnn.cli.terminal import Stopped, note, progress
from msrnn.core.state import MultiState
from msrnn.core.state_file import load_description
from msrnn.errors import UsageError
from msrnn.hf.rnn import MultiStateRNN

SECONDS = 30.0  # between checkpoints
SHARE = 20  # and as many times as long as one takes: saving costs at most a twentieth


class Checkpoint:
    """The state after some tokens of a text, in a file that names the tokens, the model and where it began."""

    def __init__(self, target: Path, ids: Tensor, load: Path | None) -> None:
        self.path, self.ids = partial_of(target), ids[0]
        self.begun = None if load is None else _digest(load.read_bytes())
        self.last, self.cost, self.failed = perf_counter(), 0.0, False

    def resume(self, rnn: MultiStateRNN, force: bool) -> tuple[MultiState, int] | None:
        """The state of an interrupted read of this text, and how many of its tokens were read."""
        if not self.path.exists():
            return None
        try:
            state, done = rnn.load_state(self.path), self._done()
            if self.begun is None and int(state.seen[0]) != done:
                raise UsageError(f"it says {done:,} tokens, and its state has read {int(state.seen[0]):,}")
        except ValueError as error:
            reason = str(error).removeprefix(f"{self.path}: ")
            if force:
                note(f"{self.path}: {reason}; reading starts anew")
                return None
            mend = "add --force to start anew, or name another file to save to"
            raise UsageError(f"{self.path}: a checkpoint that does not fit this command ({reason}); {mend}") from error
        return state, done

    def _done(self) -> int:
        """How many tokens it has read, if they are those that this text begins with."""
        found = load_description(self.path).get("notes")
        done = found.get("read") if isinstance(found, dict) else None
        if not isinstance(found, dict) or not isinstance(done, int) or isinstance(done, bool) or done < 1:
            raise UsageError("it does not say what was read")
        if done > len(self.ids):
            raise UsageError(f"it has read {done:,} tokens, and {len(self.ids):,} are asked for")
        if found != self._notes(done):
            raise UsageError("of another text" if found.get("begun") == self.begun else "begun from another state")
        return done

    def _notes(self, done: int) -> dict[str, Any]:
        return {"read": done, "text": _digest(self.ids[:done].numpy().tobytes()), "begun": self.begun}

    def save(self, state: MultiState, done: int) -> None:
        started = perf_counter()
        keep(state, self.path, self._notes(done))
        self.last = perf_counter()
        self.cost = self.last - started

    def save_if_due(self, state: MultiState, done: int) -> None:
        """Now and then. A disk that is full stops checkpoints, and not the reading."""
        if self.failed or perf_counter() - self.last < max(SECONDS, SHARE * self.cost):
            return
        started = perf_counter()
        try:
            state.save(self.path, self._notes(done))
        except (OSError, ValueError) as error:
            self.failed = True
            note(f"no checkpoint can be saved, reading goes on ({error})")
        self.last = perf_counter()
        self.cost = self.last - started

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_on(rnn: MultiStateRNN, ids: Tensor, state: MultiState, done: int, checkpoint: Checkpoint) -> float:
    """Read the tokens after the first `done`; tokens per second. Ctrl-C saves a checkpoint and raises `Stopped`."""
    total, started, begun_at = ids.shape[1], perf_counter(), done
    with progress() as bar, CtrlC() as ctrl_c:
        task = bar.add_task("reading", total=total, completed=done)

        def on_block(columns: int) -> None:
            nonlocal done
            done += columns
            bar.advance(task, columns)
            if ctrl_c.heard:
                raise KeyboardInterrupt
            checkpoint.save_if_due(state, done)

        try:
            if done < total:
                rnn.read(ids[:, done:], state, last_only=True, on_block=on_block)
        except KeyboardInterrupt:
            raise Stopped(_stopped(state, done, total, checkpoint)) from None
    return (total - begun_at) / max(perf_counter() - started, 1e-9)


def _stopped(state: MultiState, done: int, total: int, checkpoint: Checkpoint) -> str:
    """What was kept of a read that Ctrl-C ended."""
    how = "run the same command to go on"
    try:
        if done:
            checkpoint.save(state, done)
    except ValueError as error:  # ended inside a block, or the disk is full
        kept = checkpoint.path.exists()
        return f"stopped; the state was not saved ({error})" + (f"; {how} from the last checkpoint" if kept else "")
    if not done:
        return "stopped before anything was read"
    return f"stopped after {done:,} of {total:,} tokens; {how} from there ({checkpoint.path})"


class CtrlC:
    """The first Ctrl-C is heard and waits for the end of a block, since half a block leaves no state to save; the
    second interrupts at once."""

    def __init__(self) -> None:
        self.heard = False
        self._before: Any = None

    def __enter__(self) -> CtrlC:
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        if threading.current_thread() is threading.main_thread() and not ignored:
            self._before = signal.signal(signal.SIGINT, self._hear)
        return self

    def _hear(self, *_: object) -> None:
        if self.heard:
            raise KeyboardInterrupt
        self.heard = True
        # Not by print, which may be what was interrupted.
        os.write(2, b"\nstopping at the end of this block; Ctrl-C again stops at once\n")

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
