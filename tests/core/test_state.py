from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import msrnn
from msrnn.layer import Record
from msrnn.policy import Policy
from tests.helpers.tiny import build, hybrid, left_padded, llama, tokens


@pytest.fixture(scope="module")
def rnn() -> msrnn.MultiStateRNN:
    return msrnn.MultiStateRNN(build(llama()), Policy(0.5, recent=2), 10, chunk=8)


@pytest.mark.parametrize("policy", ["tova", "h2o", "full"])
def test_a_saved_state_goes_on_as_if_never_saved(policy: str, tmp_path: Path) -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), policy, None if policy == "full" else 10)
    ids, mask = left_padded(tokens(2, 40), [0, 6])
    state = rnn.state(2)
    rnn.read(ids[:, :30], state, mask[:, :30])
    state.save(tmp_path / "book.safetensors")
    loaded = rnn.load_state(tmp_path / "book.safetensors")
    assert torch.equal(rnn.read(ids[:, 30:], state), rnn.read(ids[:, 30:], loaded))
    assert torch.equal(loaded.seen, state.seen)
    assert os.listdir(tmp_path) == ["book.safetensors"]


def test_broken_files_are_refused_in_one_line(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    rnn.state().save(tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    torch.save({}, tmp_path / "pickle")
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty").write_bytes(b"")
    for name in ("pickle", "cut", "empty", "absent"):
        with pytest.raises(ValueError, match=name) as error:
            rnn.load_state(tmp_path / name)
        assert "\n" not in str(error.value)


def test_an_interrupted_save_leaves_the_old_file(
    rnn: msrnn.MultiStateRNN, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = rnn.state()
    state.save(tmp_path / "s")
    before = (tmp_path / "s").read_bytes()
    rnn.read(tokens(1, 5), state)

    def interrupted(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half a fi")
        raise KeyboardInterrupt

    monkeypatch.setattr("msrnn.core.state_file.save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        state.save(tmp_path / "s")
    assert (tmp_path / "s").read_bytes() == before
    assert os.listdir(tmp_path) == ["s"]


def test_a_missing_folder_is_named(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absent does not exist"):
        rnn.state().save(tmp_path / "absent" / "s")


def test_forks_part_and_leave_the_old_state_untouched(rnn: msrnn.MultiStateRNN) -> None:
    state = rnn.state(2)
    ids = tokens(2, 25)
    rnn.read(ids, state)
    before = state.positions(0).clone()
    forked = state.fork(2)
    assert forked.batch_size == 4
    assert torch.equal(forked.positions(1), state.positions(1).repeat_interleave(2, 0))
    rnn.read(tokens(4, 9, seed=5), forked)
    assert torch.equal(state.positions(0), before)
    assert state.seen.tolist() == [25, 25]


def test_selected_rows_go_on_alone(rnn: msrnn.MultiStateRNN) -> None:
    ids, more = tokens(3, 25), tokens(3, 6, seed=9)
    state = rnn.state(3)
    rnn.read(ids, state)
    picked = state.select([2, 0])
    expected = rnn.read(more, state)
    torch.testing.assert_close(rnn.read(more[[2, 0]], picked), expected[[2, 0]])


@pytest.mark.parametrize("sequences", [[], [3], [-1], [0.5], [[0]]])
def test_sequences_that_are_not_there_are_refused(sequences: list[object], rnn: msrnn.MultiStateRNN) -> None:
    with pytest.raises(ValueError, match="sequences"):
        rnn.state(3).select(sequences)  # type: ignore[arg-type]


@pytest.mark.parametrize("copies", [0, -1, 1.5, True])
def test_a_bad_number_of_copies_is_refused(copies: object, rnn: msrnn.MultiStateRNN) -> None:
    with pytest.raises(ValueError, match="copies="):
        rnn.state().fork(copies)  # type: ignore[arg-type]


def test_a_read_interrupted_between_layers_is_noticed() -> None:
    model = build(llama())
    rnn = msrnn.MultiStateRNN(model, "tova", 8)
    state = rnn.state()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        rnn.read(tokens(1, 5), state)
    hook.remove()
    with pytest.raises(ValueError, match="interrupted inside a forward pass"):
        rnn.read(tokens(1, 5), state)
    with pytest.raises(ValueError, match="interrupted inside a forward pass"):
        state.save("never-written")


def test_a_read_interrupted_inside_the_last_layer_is_noticed(tmp_path: Path) -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), "tova", 8, chunk=8)
    state = rnn.state()

    def record(layer: int) -> Record:
        chunks = []

        def take_down(*_: object) -> None:
            chunks.append(layer)
            if chunks == [1, 1, 1]:
                raise KeyboardInterrupt

        return take_down

    with pytest.raises(KeyboardInterrupt):
        rnn.read(tokens(1, 40), state, record=record)
    for broken in (state, state.fork(2)):
        with pytest.raises(ValueError, match="interrupted inside a forward pass"):
            broken.save(tmp_path / "never")
    state.reset()
    rnn.read(tokens(1, 40), state)
    assert torch.equal(state.positions(0) >= 0, state.positions(1) >= 0)


def test_hybrid_models_refuse_padding_that_their_linear_layers_would_read() -> None:
    rnn = msrnn.MultiStateRNN(hybrid(), "tova", 8)
    ids, mask = left_padded(tokens(2, 12), [0, 5])
    state = rnn.state(2)
    rnn.read(ids, state, mask)  # before all tokens it does no harm
    alone = rnn.state()
    rnn.read(tokens(2, 12)[1:, 5:], alone)
    more = tokens(2, 3, seed=3)
    torch.testing.assert_close(rnn.read(more, state)[1:], rnn.read(more[1:], alone), atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="read padding"):
        rnn.read(ids, state, mask)
    with pytest.raises(ValueError, match="select one and generate"):
        rnn.generate(more, state=state, max_new_tokens=2)


def test_hybrid_models_fork_but_do_not_save(tmp_path: Path) -> None:
    rnn = msrnn.MultiStateRNN(hybrid(), "tova", 8, block=16)
    ids = tokens(1, 40)
    state = rnn.state()
    whole = rnn.read(ids, state)
    assert state.nbytes > state.layers[1].nbytes
    steps = rnn.state()
    stepped = torch.cat([rnn.step(ids[:, t : t + 1], steps) for t in range(40)], dim=1)
    torch.testing.assert_close(stepped, whole, atol=1e-4, rtol=1e-4)
    forked = state.fork(2)
    more = tokens(1, 4, seed=3)
    expected = rnn.read(more, state)
    torch.testing.assert_close(rnn.read(more.repeat(2, 1), forked)[1:], expected)
    with pytest.raises(ValueError, match="layer 0"):
        state.save(tmp_path / "s")
