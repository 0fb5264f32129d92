from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import msrnn
from msrnn.core.state_file import load_tensors, save_tensors
from tests.helpers.tiny import build, llama, tokens


@pytest.fixture
def rnn() -> msrnn.MultiStateRNN:
    return msrnn.MultiStateRNN(build(llama()), "echo", 12)


@pytest.fixture
def state(rnn: msrnn.MultiStateRNN) -> msrnn.MultiState:
    """40 tokens, of which 10 to 14 are protected."""
    state = rnn.state()
    for begin, end in ((0, 10), (10, 15), (15, 40)):
        rnn.read(tokens(1, 40)[:, begin:end], state, protect=begin == 10)
    return state


def test_saved_states_protect_the_same_tokens(
    rnn: msrnn.MultiStateRNN, state: msrnn.MultiState, tmp_path: Path
) -> None:
    state.save(tmp_path / "state")
    loaded = rnn.load_state(tmp_path / "state")
    assert loaded.protected == state.protected == [[(10, 15)]]
    ids = tokens(1, 30, seed=2)
    torch.testing.assert_close(rnn.read(ids, loaded), rnn.read(ids, state), atol=1e-5, rtol=1e-5)
    assert torch.equal(loaded.positions(0), state.positions(0))


def test_protected_tokens_at_the_beginning_are_saved(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    state = rnn.state()
    rnn.read(tokens(1, 4), state, protect=True)
    rnn.read(tokens(1, 30), state)
    state.save(tmp_path / "state")
    assert rnn.load_state(tmp_path / "state").protected == [[(0, 4)]]


def test_a_state_without_protected_tokens_is_saved_as_before(
    rnn: msrnn.MultiStateRNN, state: msrnn.MultiState, tmp_path: Path
) -> None:
    state.release()
    state.save(tmp_path / "state")
    with safe_open(tmp_path / "state", "pt") as file:
        assert not [name for name in file.keys() if "protected" in name]  # noqa: SIM118
    assert rnn.load_state(tmp_path / "state").protected == [[]]


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(10, 41)], "41 is the end of no range of tokens that were read"),
        ([(12, 10)], "10 is the end of no range"),
        ([(10, 15), (14, 16)], "14 begins a protected range inside another"),
        ([(10, 30)], "tokens: 0 fit"),
    ],
)
def test_impossible_ranges_are_refused(
    ranges: list[tuple[int, int]], message: str, rnn: msrnn.MultiStateRNN, state: msrnn.MultiState, tmp_path: Path
) -> None:
    state.save(tmp_path / "state")
    tensors, description = load_tensors(tmp_path / "state")
    tensors["protected"] = torch.zeros_like(tensors["protected"])
    tensors["protected"][0, : len(ranges)] = torch.tensor(ranges)
    save_tensors(tmp_path / "wrong", tensors, description)
    with pytest.raises(ValueError, match=message):
        rnn.load_state(tmp_path / "wrong")


def test_norms_and_weights_of_the_same_rows_are_refused(
    rnn: msrnn.MultiStateRNN, state: msrnn.MultiState, tmp_path: Path
) -> None:
    """Older files have norms; which of both would count is not known."""
    state.save(tmp_path / "state")
    tensors, description = load_tensors(tmp_path / "state")
    tensors["0.norm"] = tensors["0.row_weight"].clone()
    save_tensors(tmp_path / "both", tensors, description)
    with pytest.raises(ValueError, match="both norms and weights"):
        rnn.load_state(tmp_path / "both")
    del tensors["0.row_weight"]
    save_tensors(tmp_path / "older", tensors, description)
    rnn.load_state(tmp_path / "older")
