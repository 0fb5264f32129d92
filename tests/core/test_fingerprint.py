"""Which states fit a model: those of the same weights and options, or those that can be converted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf

import msrnn
from msrnn.errors import UsageError
from tests.helpers.tiny import build, llama, tokens


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
    with pytest.raises(ValueError, match="was saved with dtype 'float32', and this model has dtype 'bfloat16'"):
        half.load_state(tmp_path / "s")


def test_a_state_knows_how_its_model_rotates(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    mine, other = build(llama()), build(llama(rope_parameters=rope))
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
    with pytest.raises(
        ValueError, match="made with positions 'original', and this model has positions 'compressed:lnln'"
    ):
        closer.read(ids, part)
    part.save(tmp_path / "state")
    with pytest.raises(ValueError, match="was saved with positions 'original', and this model has"):
        closer.load_state(tmp_path / "state")
    with pytest.raises(ValueError, match="the state was made with size 10, and this model has size 11"):
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
    with pytest.raises(ValueError, match=f"policy '{policy}\\+1', and this model has policy '{other}"):
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
        f"with other weights than those of this model, {mine}: use the model": build(llama(), seed=1),
        f"with the weights of {mine}, and this model is MistralForCausalLM\\(layers 1, hidden size 32": build(small),
        f"with other RoPE parameters than those of this model, {mine}": build(llama(rope_parameters=turned)),
    }
    for message, model in others.items():
        other = msrnn.MultiStateRNN(model, "tova", 8)
        with pytest.raises(UsageError, match=f"the state was made {message}"):
            other.read(tokens(1, 4), state)
        with pytest.raises(UsageError, match=f"state: was saved {message}") as error:
            other.load_state(tmp_path / "state")
        assert state.fingerprint["model"] not in str(error.value)


@pytest.mark.parametrize("named", ["/models/one", "models/one/", "owner/one"])
def test_models_are_called_as_their_folders(named: str, tmp_path: Path) -> None:
    """Or as on the hub, without the owner; the name decides nothing."""
    one, other = build(llama()), build(llama(), seed=1)
    one.config.name_or_path, other.config.name_or_path = named, "../other"
    state = msrnn.MultiStateRNN(one, "tova", 8).state()
    state.save(tmp_path / "state")
    kind = r"LlamaForCausalLM\(layers 2, hidden size 48, vocabulary 97\)"
    message = f"state: was saved with the weights of one {kind}, and this model is other {kind}: use the model and"
    with pytest.raises(UsageError, match=message):
        msrnn.MultiStateRNN(other, "tova", 8).load_state(tmp_path / "state")
    one.config.name_or_path = "renamed"
    renamed = msrnn.MultiStateRNN(one, "tova", 8)
    assert repr(renamed).startswith("MultiStateRNN(renamed LlamaForCausalLM(layers 2,")
    renamed.read(tokens(1, 4), renamed.load_state(tmp_path / "state"))
    renamed.read(tokens(1, 4), state)


def test_files_without_a_name_of_their_model_fit(tmp_path: Path) -> None:
    """As they were saved before."""
    rnn = msrnn.MultiStateRNN(build(llama()), "tova", 8)
    state = rnn.state()
    rnn.read(tokens(1, 12), state)
    before = {name: value for name, value in state.fingerprint.items() if name != "architecture"}
    older = msrnn.MultiState(state.layers, before, state.columns)
    older.save(tmp_path / "state")
    assert rnn.load_state(tmp_path / "state").seen.tolist() == [12]
    rnn.read(tokens(1, 4), older)
    with pytest.raises(UsageError, match="was saved with other weights than those of this model, LlamaForCausalLM"):
        msrnn.MultiStateRNN(build(llama(), seed=1), "tova", 8).load_state(tmp_path / "state")
