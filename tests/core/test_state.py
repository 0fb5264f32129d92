from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import transformers as tf
from tiny import build, hybrid, left_padded, llama, tokens

import msrnn
from msrnn.errors import UsageError
from msrnn.layer import Record
from msrnn.policy import Policy


@pytest.fixture(scope="module")
def rnn() -> msrnn.MultiStateRNN:
    return msrnn.MultiStateRNN(build(llama()), Policy(0.5, recent=2), 10, chunk=8)


@pytest.mark.parametrize(
    ("policy", "groups", "bookkeeping"),
    [("tova", 1, 4), ("window+4", 1, 4), ("h2o-layer", 1, 8), ("h2o", 2, 8), ("echo", 1, 12)],
)
def test_bytes_are_what_the_formula_says_from_the_start(policy: str, groups: int, bookkeeping: int) -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), policy, 10)
    layers, kv_heads, dim, batch, slots = 2, 2, 8, 3, 11
    state = rnn.state(batch)
    counters = layers * batch * 8
    expected = layers * batch * (2 * kv_heads * slots * dim * 4 + groups * slots * bookkeeping) + counters
    assert state.nbytes == expected
    pointers = [t.data_ptr() for layer in state.layers for t in layer.tensors().values()]
    rnn.read(tokens(batch, 50), state)
    rnn.step(tokens(batch, 1), state)
    assert state.nbytes == expected
    assert pointers == [t.data_ptr() for layer in state.layers for t in layer.tensors().values()], "a buffer moved"


def test_seen_counts_tokens_and_not_padding(rnn: msrnn.MultiStateRNN) -> None:
    ids, mask = left_padded(tokens(2, 20), [0, 6])
    state = rnn.state(2)
    rnn.read(ids, state, mask)
    assert state.seen.tolist() == [20, 14]
    assert state.positions(0).shape == (2, 1, 11)
    assert state.positions(1)[1].max() == 13


def test_a_new_state_is_empty(rnn: msrnn.MultiStateRNN) -> None:
    state = rnn.state(2)
    assert state.seen.tolist() == [0, 0]
    assert (state.positions(0) == -1).all()


def test_an_unknown_layer_is_named(rnn: msrnn.MultiStateRNN) -> None:
    with pytest.raises(ValueError, match="layer=7"):
        rnn.state().positions(7)


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


@pytest.mark.parametrize(
    ("model", "policy", "size", "named"),
    [(0, "tova", 12, "size"), (0, "window", 10, "policy"), (1, "tova", 10, "other"), (0, "full", None, "policy")],
)
def test_a_foreign_state_is_refused(model: int, policy: str, size: int | None, named: str, tmp_path: Path) -> None:
    mine = msrnn.MultiStateRNN(build(llama(), seed=0), "tova", 10)
    mine.state().save(tmp_path / "s")
    other = msrnn.MultiStateRNN(build(llama(), seed=model), policy, size)
    with pytest.raises(ValueError, match=f"with {named} "):
        other.load_state(tmp_path / "s")
    with pytest.raises(ValueError, match=f"with {named} "):
        other.read(tokens(1, 3), mine.state())


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    msrnn.MultiStateRNN(build(llama()), "tova", 10).state().save(tmp_path / "s")
    half = msrnn.MultiStateRNN(build(llama()).to(torch.bfloat16), "tova", 10)
    with pytest.raises(ValueError, match="with dtype 'float32' does not fit a model with dtype 'bfloat16'"):
        half.load_state(tmp_path / "s")


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


@pytest.mark.parametrize("rows", [[], [3], [-1], [0.5], [[0]]])
def test_rows_that_are_not_there_are_refused(rows: list[object], rnn: msrnn.MultiStateRNN) -> None:
    with pytest.raises(ValueError, match="rows"):
        rnn.state(3).select(rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("copies", [0, -1, 1.5, True])
def test_a_bad_number_of_copies_is_refused(copies: object, rnn: msrnn.MultiStateRNN) -> None:
    with pytest.raises(ValueError, match="fork"):
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


def test_a_state_knows_how_its_model_rotates(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    mine, other = (build(llama(**more)) for more in ({}, {"rope_parameters": rope}))
    other.load_state_dict(mine.state_dict())
    rnn, turning = (msrnn.MultiStateRNN(model, "tova", 8) for model in (mine, other))
    state = rnn.state()
    rnn.read(tokens(1, 20), state)
    state.save(tmp_path / "new")
    with pytest.raises(ValueError, match="other RoPE parameters"):
        turning.load_state(tmp_path / "new")
    del state.fingerprint["rotary"]  # as states were saved before
    state.save(tmp_path / "old")
    assert rnn.load_state(tmp_path / "old").seen.tolist() == [20]


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
    with pytest.raises(ValueError, match="select a row"):
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


@pytest.mark.parametrize("policy", ["tova", "echo", "h2o"])
def test_slots_in_use_are_those_in_front(policy: str) -> None:
    """However large a state may become, what it holds lies in front, and is written there."""
    rnn = msrnn.MultiStateRNN(build(llama()), policy, 40)
    state = rnn.state(2)
    assert state.layers[0].in_use(3).position.shape[2] == 4
    for n in (7, 1, 2):
        rnn.read(tokens(2, n, seed=n), state)
    for layer in state.layers:
        used = layer.in_use(3)
        assert used.position.shape[2] == used.keys.shape[2] == 14
        assert ((used.position >= 0) == (torch.arange(14) < 10)).all()
        used.position[0, 0, 13] = 99
        assert layer.position[0, 0, 13] == 99
        assert layer.in_use(30) is layer


@pytest.mark.parametrize("policy", ["tova", "h2o"])
def test_positions_can_be_changed_at_any_token(policy: str, tmp_path: Path) -> None:
    """A state that nothing has left yet is the same under any positions, so that what follows is, too."""
    plain, closer = (msrnn.MultiStateRNN(build(llama()), policy, 10, positions=p) for p in ("original", "compressed"))
    ids = tokens(2, 40)
    whole, part = closer.state(2), plain.state(2)
    closer.read(ids[:, :10], whole)
    plain.read(ids[:, :10], part)
    adopted = closer.convert_state(part)
    expected = closer.read(ids[:, 10:], whole)
    torch.testing.assert_close(closer.read(ids[:, 10:], adopted), expected, atol=1e-4, rtol=1e-4)
    assert part.seen.tolist() == [10, 10]
    with pytest.raises(ValueError, match="positions 'original' does not fit a model with positions 'compressed:lnln'"):
        closer.read(ids, part)
    part.save(tmp_path / "state")
    with pytest.raises(ValueError, match="saved with positions 'original' does not fit"):
        closer.load_state(tmp_path / "state")
    with pytest.raises(ValueError, match="a state with size 10 does not fit a model with size 11"):
        msrnn.MultiStateRNN(build(llama()), policy, 11, positions="compact").convert_state(part)


@pytest.mark.parametrize("policy", ["tova", "h2o"])
def test_a_horizon_can_begin_at_any_token(policy: str) -> None:
    """One that nothing has passed yet is the same as one from the first token on; a later one hides what is farther."""
    free, near = (msrnn.MultiStateRNN(build(llama()), f"{policy}+1{horizon}", 10) for horizon in ("", "~30"))
    ids = tokens(2, 70)
    whole, part = near.state(2), free.state(2)
    near.read(ids[:, :29], whole)
    free.read(ids[:, :29], part)
    adopted = near.convert_state(part)
    torch.testing.assert_close(near.read(ids[:, 29:], adopted), near.read(ids[:, 29:], whole), atol=1e-4, rtol=1e-4)

    free.read(ids[:, 29:], part)
    late = near.convert_state(part)
    near.read(ids[:, :1], late)
    for layer in late.layers:
        held = layer.position[layer.position > 0]
        assert held.numel()
        assert int(held.min()) > 70 - 30
    other = "tova-head" if policy == "tova" else "h2o-layer"
    with pytest.raises(ValueError, match=f"policy '{policy}\\+1' does not fit a model with policy '{other}"):
        msrnn.MultiStateRNN(build(llama()), f"{other}+1~30", 10).convert_state(part)


def test_states_of_other_models_are_named_and_not_numbered(tmp_path: Path) -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), "tova", 8)
    state = rnn.state()
    rnn.read(tokens(1, 12), state)
    state.save(tmp_path / "state")
    mine = r"LlamaForCausalLM\(layers 2, hidden size 48, vocabulary 97\)"
    small = tf.MistralConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    turned = {"rope_type": "default", "rope_theta": 500.0}
    others = {
        f"with other weights than those of this {mine} does not fit it: use the model": build(llama(), seed=1),
        f"with the weights of {mine} does not fit MistralForCausalLM\\(layers 1, hidden size 32": build(small),
        f"with other RoPE parameters than those of this {mine}": build(llama(rope_parameters=turned)),
    }
    for message, model in others.items():
        other = msrnn.MultiStateRNN(model, "tova", 8)
        with pytest.raises(UsageError, match=f"a state {message}"):
            other.read(tokens(1, 4), state)
        with pytest.raises(UsageError, match=f"saved {message}") as error:
            other.load_state(tmp_path / "state")
        assert state.fingerprint["model"] not in str(error.value)


def test_files_without_a_name_of_their_model_fit(tmp_path: Path) -> None:
    """As they were saved before."""
    rnn = msrnn.MultiStateRNN(build(llama()), "tova", 8)
    state = rnn.state()
    rnn.read(tokens(1, 12), state)
    before = {name: value for name, value in state.fingerprint.items() if name != "architecture"}
    older = msrnn.MultiState(state.layers, before)
    older.save(tmp_path / "state")
    assert rnn.load_state(tmp_path / "state").seen.tolist() == [12]
    rnn.read(tokens(1, 4), older)
    with pytest.raises(UsageError, match="saved with other weights than those of this LlamaForCausalLM"):
        msrnn.MultiStateRNN(build(llama(), seed=1), "tova", 8).load_state(tmp_path / "state")
