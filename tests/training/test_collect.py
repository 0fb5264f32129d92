from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import msrnn
from msrnn.hf.inspect import inspect_model
from msrnn.policy import Policy
from msrnn.training.collect import collect_decisions, find_stacks
from tests.helpers.tiny import FAMILIES, build, llama, tokens

AHEAD = 64
MOMENTS = (AHEAD, 3 * AHEAD)
POLICIES = ("echo", "echo+2", Policy(0.9, "head", 1, 5, True), Policy(0.0, value_norm=True))


def find_evicted(rnn: msrnn.MultiStateRNN, ids: torch.Tensor, layer: int, step: int) -> torch.Tensor:
    """The position [B, G] that a layer evicts at a step."""
    times = msrnn.trace(rnn, ids).evicted_at[:, layer]
    return (times == step).int().argmax(-1)


@pytest.mark.parametrize("policy", POLICIES)
def test_without_networks_the_lowest_candidate_is_the_evicted_one(policy: Any) -> None:
    """At the very step, and also with groups of one KV head."""
    rnn = msrnn.MultiStateRNN(build(llama()), policy, 24)
    ids = tokens(2, 5 * AHEAD)
    (stack,) = find_stacks(rnn.spec)
    assert stack.layers == (0, 1)
    (decisions,) = collect_decisions(rnn, [stack], ids, MOMENTS, AHEAD)
    assert decisions.moments == 2 * len(MOMENTS)
    lowest = (decisions.importance + decisions.norm).argmin(-1)  # [moments * B, L, G]
    for m, moment in enumerate(MOMENTS):
        state = rnn.state(2)
        rnn.read(ids[:, :moment], state)
        for layer in stack.layers:
            bound = rnn.spec.bounds[layer]
            assert bound is not None
            held = state.positions(layer).sort(-1).values[..., 1 + bound.policy.first :]
            chosen = held.gather(-1, lowest[2 * m : 2 * m + 2, layer][..., None])[..., 0]
            evicted = find_evicted(rnn, ids, layer, moment)
            new = (evicted == moment) & (bound.recent == 0)  # the new token itself is evicted
            assert (new | (chosen == evicted)).all()


def test_the_number_of_candidates_and_the_future() -> None:
    model = build(llama())
    rnn = msrnn.MultiStateRNN(model, "echo", 24)
    (decisions,) = collect_decisions(rnn, find_stacks(rnn.spec), tokens(1, 4 * AHEAD), [AHEAD], AHEAD)
    assert decisions.importance.shape == (1, 2, 1, 24 - (9 - 1))
    assert decisions.inputs.shape == (1, 2, 2, 16, 16)
    assert (decisions.change > 0).all()
    other = torch.cat([tokens(1, 4 * AHEAD)[:, : AHEAD + 1], tokens(1, 3 * AHEAD, seed=5)], 1)
    (changed,) = collect_decisions(rnn, find_stacks(rnn.spec), other, [AHEAD], AHEAD)
    torch.testing.assert_close(changed.importance, decisions.importance)
    assert not torch.allclose(changed.change, decisions.change)


def test_reading_with_watched_layers_is_reading() -> None:
    """The model that is watched reads the same: a later moment sees what an unwatched one has left."""
    rnn, ids = msrnn.MultiStateRNN(build(llama()), "echo", 24), tokens(1, 4 * AHEAD)
    both = collect_decisions(rnn, find_stacks(rnn.spec), ids, MOMENTS, AHEAD)[0]
    last = collect_decisions(rnn, find_stacks(rnn.spec), ids, MOMENTS[1:], AHEAD)[0]
    for one, other in zip(both, last, strict=True):
        torch.testing.assert_close(one[1:], other)


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "gpt-oss"])
def test_other_models(family: str) -> None:
    model: PreTrainedModel = build(FAMILIES[family]())
    rnn = msrnn.MultiStateRNN(model, "echo", 10)
    stacks = find_stacks(rnn.spec)
    assert stacks
    for decisions in collect_decisions(rnn, stacks, tokens(2, 3 * AHEAD), [AHEAD], AHEAD):
        assert all(field.isfinite().all() for field in decisions)
    assert inspect_model(model).fingerprint == rnn.spec.model.fingerprint


def test_layers_that_hold_their_whole_window_are_left_out() -> None:
    rnn = msrnn.MultiStateRNN(build(FAMILIES["gemma2"]()), "echo", 24)
    layers = [layer for stack in find_stacks(rnn.spec) for layer in stack.layers]
    assert layers == [i for i, bound in enumerate(rnn.spec.bounds) if bound and bound.policy.name == "echo"]
    assert len(layers) < len(rnn.spec.bounds)


@pytest.mark.parametrize(("far", "dtype"), [(1e3, torch.float16), (1e-3, torch.float32)])
def test_inputs_are_float16_unless_they_are_far_from_0(
    far: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msrnn.training.collect.FAR", far)
    rnn = msrnn.MultiStateRNN(build(llama()), "echo", 24)
    (decisions,) = collect_decisions(rnn, find_stacks(rnn.spec), tokens(1, 2 * AHEAD), [AHEAD], AHEAD)
    assert decisions.inputs.dtype == dtype


@pytest.mark.parametrize("ahead", [24, 48])
def test_as_many_steps_count_as_are_asked_for(ahead: int) -> None:
    rnn, read = msrnn.MultiStateRNN(build(llama()), "echo", 24), list[int]()
    ids = tokens(2, 3 * ahead)
    (stack,) = find_stacks(rnn.spec)
    (found,) = collect_decisions(rnn, [stack], ids, [ahead], ahead, read.append)
    assert read == [2 * ahead] * 2
    for change, counts in ((2 * ahead - 1, True), (2 * ahead, False)):  # the last token that counts, and the next one
        other = ids.clone()
        other[:, change] += 1
        (changed,) = collect_decisions(rnn, [stack], other, [ahead], ahead)
        assert torch.equal(found.change, changed.change) != counts
