"""States after each leg: names without loading, and files of other batches are left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from msrnn.evaluation.store import Store
from msrnn.evaluation.tasks.leg_states import LegStates, remove_empty_folder, states_folder
from msrnn.hf.rnn import MultiStateRNN
from tests.helpers.courses import CASES
from tests.helpers.tiny import build, llama, tokens


@pytest.fixture(scope="module")
def rnn() -> MultiStateRNN:
    return CASES[0].rnn(build(llama()))


def test_states_by_tokens(rnn: MultiStateRNN, tmp_path: Path) -> None:
    folder = tmp_path / "x.states"
    mine, others = LegStates(folder, ["texts", 1]), LegStates(folder, ["texts", 2])
    assert mine.list_tokens() == []
    state = rnn.state(2)
    for count in (15, 30):
        rnn.read(tokens(2, 15), state)
        mine.save(count, state, rnn)
    others.save(15, state, rnn)
    assert sorted(mine.list_tokens()) == [15, 30]
    assert folder.stat().st_mode & 0o777 == 0o700
    found = mine.load(30, rnn)
    assert found.seen.tolist() == [30, 30]
    for one, other in zip(found.layers, state.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
    (unfinished := folder / f".{min(folder.glob('*-15.*')).name}.x1y2.tmp").mkdir()
    for states in (mine, others):
        states.delete(but=30)
    assert (mine.list_tokens(), others.list_tokens(), unfinished.exists()) == ([30], [], False)
    remove_empty_folder(folder)
    mine.delete()
    remove_empty_folder(folder)
    remove_empty_folder(folder)
    assert not folder.exists()


def test_without_a_folder_nothing_is_saved(rnn: MultiStateRNN, tmp_path: Path) -> None:
    """Nor where the folder of the records is not there: a worker may be on another machine."""
    assert states_folder(Store(None)) is None
    assert states_folder(Store(tmp_path / "x.jsonl")) == tmp_path.resolve() / "x.states"
    for folder in (None, tmp_path / "elsewhere" / "x.states"):
        states = LegStates(folder, "key")
        states.save(15, rnn.state(1), rnn)
        states.delete()
        assert states.list_tokens() == []
    assert not any(tmp_path.iterdir())
