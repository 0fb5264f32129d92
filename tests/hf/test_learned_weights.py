"""Policies with a file of row weights, on whole models: `echo@FILE.safetensors`."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import PreTrainedModel

import msrnn
from msrnn.core.fingerprint import WEIGHTS
from msrnn.core.slots import HELD
from msrnn.errors import FileError, UsageError
from msrnn.hf.inspect import inspect_model
from msrnn.hf.learned_weights import load_policy_weights
from msrnn.policy import Policy
from tests.helpers.networks import write_random_weights
from tests.helpers.shards import Others
from tests.helpers.tiny import FAMILIES, ROTARY, build, left_padded, llama, oracle, tokens

CONFIGS = {
    "GQA": llama,
    "MHA": lambda: llama(2, 2),
    "partial": ROTARY["partial: gpt-neox"],
    "neighbours": ROTARY["neighbours, partial: glm"],
    "not in every layer": ROTARY["not in every layer: smollm3"],
    "without RoPE": FAMILIES["gpt2"],
    "sliding": FAMILIES["gemma2"],
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama())


@pytest.fixture(scope="module")
def file(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_weights(tmp_path_factory.mktemp("weights") / "Some, =+~Weights.safetensors", model)


def check_against_oracle(rnn: msrnn.MultiStateRNN, policy: str | Policy, size: int) -> None:
    ids, mask = left_padded(tokens(2, 48), [0, 9])
    logits, evicted_at = rnn.read(ids, rnn.state(2), mask), msrnn.trace(rnn, ids, mask).evicted_at
    networks = [shape.network if shape else None for shape in rnn.spec.shapes]
    for row, start in enumerate((0, 9)):
        truth = oracle(rnn.model, ids[row, start:], policy, size, rnn.spec.repositioning, networks)
        steps = torch.where(evicted_at[row, ..., start:] == 48, HELD, evicted_at[row, ..., start:] - start)
        assert truth.agrees(steps)
        part = slice(start, start + truth.excused_from + 1)
        torch.testing.assert_close(logits[row, part], truth.logits[: truth.excused_from + 1], atol=1e-4, rtol=1e-4)
        assert truth.excused_from > 12


@pytest.mark.parametrize("family", CONFIGS)
def test_chunked_model_is_recurrent_model(family: str, tmp_path: Path) -> None:
    model = build(CONFIGS[family]())
    file = write_random_weights(tmp_path / "weights.safetensors", model)
    for policy in (f"echo+1@{file}", Policy(0.5, "head", 0, 2, True, weights=str(file))):
        check_against_oracle(msrnn.MultiStateRNN(model, policy, 15, chunk=16, block=32), policy, 15)


@pytest.mark.parametrize("options", [{"positions": "compressed"}, {"backend": "torch", "chunk": 5}])
def test_options(model: PreTrainedModel, file: Path, options: dict[str, Any]) -> None:
    check_against_oracle(msrnn.MultiStateRNN(model, f"echo@{file}", 12, **options), f"echo@{file}", 12)


def test_networks_see_keys_before_their_rotation(model: PreTrainedModel, file: Path) -> None:
    """A text and the same text a thousand positions later: all weights are the same."""
    rnn = msrnn.MultiStateRNN(model, f"echo@{file}", 30)
    near, far = rnn.state(), rnn.state()
    for layer in far.layers:
        layer.seen.fill_(1000)
    for state in (near, far):
        rnn.read(tokens(1, 25), state)
    for one, other in zip(near.layers, far.layers, strict=True):
        torch.testing.assert_close(one.row_weight[..., :25], other.row_weight[..., :25], rtol=2e-3, atol=1e-4)


def test_weights_change_what_is_kept_and_the_seed_of_their_file_too(
    model: PreTrainedModel, file: Path, tmp_path: Path
) -> None:
    other = write_random_weights(tmp_path / "other.safetensors", model, seed=5)
    held = []
    for policy in ("echo", f"echo@{file}", f"echo@{other}"):
        rnn = msrnn.MultiStateRNN(model, policy, 12)
        state = rnn.state()
        rnn.read(tokens(1, 100), state)
        held.append(str(state.positions(0).sort().values.tolist()))
    assert len(set(held)) == 3


def test_the_split_and_the_batch_do_not_matter(model: PreTrainedModel, file: Path) -> None:
    ids, mask = left_padded(tokens(3, 60), [0, 11, 30])
    whole = msrnn.MultiStateRNN(model, f"echo+2~40@{file}", 12)
    expected_state = whole.state(3)
    expected = whole.read(ids, expected_state, mask)
    rnn = msrnn.MultiStateRNN(model, f"echo+2~40@{file}", 12, chunk=3, block=7, backend="torch")
    state = rnn.state(3)
    parts = [rnn.read(ids[:, a:b], state, mask[:, a:b]) for a, b in itertools.pairwise((0, 1, 2, 20, 45, 59, 60))]
    torch.testing.assert_close(torch.cat(parts, 1)[mask == 1], expected[mask == 1], atol=1e-4, rtol=1e-4)
    alone = whole.state()
    torch.testing.assert_close(whole.read(ids[2:, 30:], alone), expected[2:, 30:], atol=1e-4, rtol=1e-4)
    for layer in range(2):
        assert torch.equal(state.positions(layer).sort(-1).values, expected_state.positions(layer).sort(-1).values)


def test_states_are_saved_forked_and_protected(model: PreTrainedModel, file: Path, tmp_path: Path) -> None:
    path, ids = tmp_path / "state.safetensors", tokens(2, 40)
    rnn = msrnn.MultiStateRNN(model, f"echo@{file}", 12, state_dtype="int8")
    state = rnn.state(2)
    rnn.read(ids[:, :3], state, protect=True)
    rnn.read(ids[:, 3:30], state)
    state.save(path)
    fork = state.fork(2)
    expected = rnn.read(ids[:, 30:], state)
    for layer in range(2):
        assert all({0, 1, 2} <= set(row) for row in state.positions(layer)[:, 0].tolist())
    torch.testing.assert_close(rnn.read(ids[:, 30:], rnn.load_state(path)), expected)
    torch.testing.assert_close(rnn.read(ids[[0, 0, 1, 1], 30:], fork)[::2], expected)
    assert rnn.generate(ids, state, max_new_tokens=3, do_sample=False).shape == (2, 43)
    state.layers[1].row_weight[0, 0] *= 1.5
    with pytest.raises(UsageError, match="is not the weight of the stored row"):
        state.save(path)


def test_a_file_is_known_by_its_content(model: PreTrainedModel, file: Path, tmp_path: Path) -> None:
    path, copied = tmp_path / "state.safetensors", tmp_path / "copied.safetensors"
    shutil.copy(file, copied)
    other = write_random_weights(tmp_path / "other.safetensors", model, seed=5)
    rnn = msrnn.MultiStateRNN(model, f"echo@{file}", 12)
    state = rnn.state()
    rnn.read(tokens(1, 30), state)
    state.save(path)
    assert str(file).encode() not in path.read_bytes()
    same = msrnn.MultiStateRNN(model, f"echo@{copied}", 12)
    assert same.spec.fingerprint == rnn.spec.fingerprint
    same.read(tokens(1, 10), same.load_state(path))
    longer = msrnn.MultiStateRNN(model, f"echo+1~40@{copied}", 12)
    longer.read(tokens(1, 10), longer.convert_state(state))
    for policy in ("echo", f"echo@{other}"):
        another = msrnn.MultiStateRNN(model, policy, 12)
        with pytest.raises(UsageError, match="row_weights"):
            another.load_state(path)
        with pytest.raises(UsageError, match="row_weights"):
            another.convert_state(state)
        with pytest.raises(UsageError, match="row_weights"):
            another.read(tokens(1, 3), state)
    plain = msrnn.MultiStateRNN(model, "echo", 12)
    with pytest.raises(UsageError, match="row_weights None"):
        rnn.convert_state(plain.state())
    assert WEIGHTS not in plain.spec.fingerprint


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (llama(), "made for other weights"),
        (llama(num_hidden_layers=3), "made for other weights"),
        (llama(2, 2), "made for other weights"),
    ],
)
def test_another_model_is_refused(config: tf.PreTrainedConfig, message: str, file: Path) -> None:
    other = build(config, seed=1)
    with pytest.raises(FileError, match=message):
        msrnn.MultiStateRNN(other, f"echo@{file}", 12)
    with pytest.raises(FileError, match=message):
        msrnn.MultiStateCache(other, f"echo@{file}", 12)


def test_a_model_whose_rotation_is_not_known_is_refused(tmp_path: Path) -> None:
    parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = build(llama(rope_parameters=parameters))
    file = write_random_weights(tmp_path / "weights.safetensors", model)
    with pytest.raises(UsageError, match=r"before their rotation.*; use a policy without a file"):
        msrnn.MultiStateRNN(model, f"echo@{file}", 12)


def test_no_file_is_read_without_one(model: PreTrainedModel) -> None:
    spec = msrnn.MultiStateRNN(model, "random", 12).spec.model
    assert load_policy_weights(spec, Policy.parse("echo")) is None
    assert load_policy_weights(spec, Policy.parse("random")) is None
    with pytest.raises(FileError, match="no such file"):
        load_policy_weights(spec, Policy.parse("echo@nowhere.safetensors"))


def test_the_cache_and_the_engine(model: PreTrainedModel, file: Path, tmp_path: Path) -> None:
    ids = tokens(1, 30)
    rnn = msrnn.MultiStateRNN(model, f"echo@{file}", 12)
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = rnn.generate(ids, **settings)
    cache = msrnn.MultiStateCache(model, f"echo@{file}", 12)
    assert torch.equal(model.generate(ids, past_key_values=cache, **settings), expected)
    params = msrnn.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine = msrnn.Engine(rnn, slots=2, prompt_tokens=7, sessions=tmp_path)
    prompts = [ids[0].tolist(), tokens(1, 9, seed=4)[0].tolist()]
    answers = [request.answers[0].tokens for request in engine.generate(prompts, params, progress=False)]
    assert answers[0] == expected[0, 30:].tolist()


def test_processes_with_other_files_are_refused(
    model: PreTrainedModel, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would evict other tokens."""
    spec, policy = inspect_model(model), Policy.parse(f"echo@{file}")
    assert load_policy_weights(spec, policy) is not None
    monkeypatch.setattr(spec, "shards", Others([torch.tensor([5])]))
    with pytest.raises(msrnn.UsageError, match=r"the processes have read other row weights \(ranks 1 differ"):
        load_policy_weights(spec, policy)
