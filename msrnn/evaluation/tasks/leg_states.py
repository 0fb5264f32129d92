"""States that are saved after each leg of a text, so that an interrupted extrapolation resumes there."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from msrnn.core.state import MultiState
from msrnn.core.state_file import load_description
from msrnn.core.state_folder import StateFolder, StateNames
from msrnn.evaluation.store import Store
from msrnn.hf.rnn import MultiStateRNN


class LegStates:
    """The saved states of one batch of texts, by the tokens that they have read. Without a folder, none are saved.

    key  identifies the batch: the same texts, model, policy and size
    """

    def __init__(self, folder: Path | None, key: Any) -> None:
        self._path = folder
        self._digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]

    def list_tokens(self) -> list[int]:
        """The tokens that each saved state has read. No state is loaded."""
        names = [] if self._path is None else self._names(self._path).list_names()
        return [int(name.rpartition("-")[2]) for name in names]

    def load(self, tokens: int, rnn: MultiStateRNN) -> MultiState:
        state, _ = self._folder(rnn).load(self._name_of(tokens))
        return state

    def save(self, tokens: int, state: MultiState, rnn: MultiStateRNN) -> None:
        if self._path is not None and self._path.parent.exists():  # a worker on another machine may not have it
            self._folder(rnn).save(self._name_of(tokens), state, {})

    def delete(self, but: int | None = None) -> None:
        """Delete all files but the one that the newest record needs."""
        if self._path is None:
            return
        names = self._names(self._path)
        for tokens in self.list_tokens():
            if tokens != but:
                names.delete(self._name_of(tokens))  # processes that share a model all do this
        names.remove_unfinished()  # of a worker that was killed

    def _name_of(self, tokens: int) -> str:
        return f"{self._digest}-{tokens}"

    def _is_own(self, name: str) -> bool:
        return re.fullmatch(rf"{self._digest}-\d+", name) is not None

    def _names(self, path: Path) -> StateNames:
        return StateNames(path, self._is_own)

    def _folder(self, rnn: MultiStateRNN) -> StateFolder[MultiState]:
        assert self._path is not None
        return StateFolder(self._path, _Files(rnn), self._is_own)


class _Files:
    """The state files of a model."""

    def __init__(self, rnn: MultiStateRNN) -> None:
        self._rnn = rnn

    def save(self, state: MultiState, path: Path, notes: Mapping[str, Any]) -> None:
        state.save(path, dict(notes))

    def load(self, path: Path) -> MultiState:
        return self._rnn.load_state(path)

    def describe(self, path: Path) -> dict[str, Any]:
        return load_description(path)


def states_folder(store: Store) -> Path | None:
    """Where the states of a run are saved: next to its records."""
    return store.path.resolve().with_suffix(".states") if store.path else None


def remove_empty_folder(folder: Path) -> None:
    if folder.exists() and not any(folder.iterdir()):
        with suppress(FileNotFoundError):  # processes that share a model all do this
            folder.rmdir()
