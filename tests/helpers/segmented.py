"""States with archives of several segments, and the files that they are saved to."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

import msrnn
from msrnn.core.segment_folder import find_folder
from tests.helpers.tiny import build, llama, tokens

SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}


def recalling(**options: Any) -> msrnn.MultiStateRNN:
    return msrnn.MultiStateRNN(build(llama(2, 2, **SMALL)), "tova", 16, **{"recall": 8, **options})


def read(rnn: msrnn.MultiStateRNN, state: msrnn.MultiState, count: int, seed: int = 1) -> msrnn.MultiState:
    rnn.read(tokens(state.batch_size, count, seed), state)
    return state


def save(state: msrnn.MultiState, path: Path, turn: int = 0) -> None:
    state.save(path, {"turn": turn}, segments_apart=True)


class Written(NamedTuple):
    """What tells whether a file was written again."""

    number: int
    bytes: int
    time: int


def segments(path: Path) -> dict[str, Written]:
    stats = {file.name: file.stat() for file in sorted(find_folder(path).glob("*"))}
    return {name: Written(stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def assert_equal(rnn: msrnn.MultiStateRNN, one: msrnn.MultiState, other: msrnn.MultiState) -> None:
    """Both answer the same, from the archive too; neither changes."""
    question = tokens(one.batch_size, 6, seed=9)
    pair = [rnn.read(question, state.fork(1), recall_every=3) for state in (one, other)]
    assert torch.equal(*pair)
