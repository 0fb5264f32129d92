"""Policies with a Python function: built-in policies that are written as functions evict the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import msrnn
from msrnn.policy import NAMES, Policy
from msrnn.scored import Candidates, ScoredPolicy
from tests.helpers.scored_policies import as_function
from tests.helpers.tiny import FAMILIES, build, left_padded, llama, tokens


def evictions(policy: Policy, size: int, ids: Tensor, mask: Tensor, model: Any, **options: Any) -> Tensor:
    return msrnn.trace(msrnn.MultiStateRNN(model, policy, size, backend="torch", **options), ids, mask).evicted_at


# A function is not told the layer and the head that random weights depend on.
CASES = [("llama", name) for name in [*NAMES, "tova+2~20"] if name != "random"]
CASES += [(family, name) for family in ("mistral-sliding", "gemma2", "gpt-oss") for name in ("tova", "h2o")]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_functions_evict_as_the_policies_that_they_state(family: str, name: str) -> None:
    model, policy = build(FAMILIES[family]()), Policy.parse(name)
    ids, mask = left_padded(tokens(2, 40), [5, 0])
    expected = evictions(policy, 8, ids, mask, model)
    assert torch.equal(evictions(as_function(policy), 8, ids, mask, model), expected)
    assert (expected < 40).any()


@pytest.mark.parametrize("options", [{"state_dtype": "int8"}, {"positions": "compressed:4"}, {"positions": "compact"}])
def test_with_other_states_and_positions(options: dict[str, Any]) -> None:
    model, (ids, mask) = build(llama()), left_padded(tokens(2, 40), [5, 0])
    policy = NAMES["h2o"]
    expected = evictions(policy, 8, ids, mask, model, **options)
    assert torch.equal(evictions(as_function(policy), 8, ids, mask, model, **options), expected)


def test_any_split_gives_the_same() -> None:
    """As the built-in policy gives: in blocks and chunks of any width, and in decode steps."""
    model, ids, policy = build(llama()), tokens(1, 40), Policy.parse("h2o+1~30")
    built_in = msrnn.MultiStateRNN(model, policy, 8, backend="torch")
    expected = built_in.read(ids, built_in.state())
    splits: list[dict[str, Any]] = [{}, {"chunk": 3}, {"block": 7, "chunk": 2}]
    for options in splits:
        rnn = msrnn.MultiStateRNN(model, as_function(policy), 8, **options)
        torch.testing.assert_close(rnn.read(ids, rnn.state()), expected, rtol=1e-3, atol=1e-4)
    state = rnn.state()
    steps = torch.cat([rnn.step(ids[:, i : i + 1], state) for i in range(ids.shape[1])], dim=1)
    torch.testing.assert_close(steps, expected, rtol=1e-3, atol=1e-4)


def test_what_a_function_sees() -> None:
    """The rows that the token sees, the oldest first, and what it returned for them before."""
    calls: list[Candidates] = []

    def score(seen: Candidates) -> Tensor:
        calls.append(seen)
        return seen.positions.float() % 3  # of rows 0 to 4, first 0 and then 3 are evicted

    rnn = msrnn.MultiStateRNN(build(llama(6, 2, num_hidden_layers=1)), ScoredPolicy(score=score, recent=1), 4)
    rnn.read(tokens(1, 6), rnn.state())
    assert [seen.positions.tolist() for seen in calls] == [
        [0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [1, 2, 3, 4, 5]
    ]  # fmt: skip
    last = calls[-1]
    assert last.importance.tolist() == [1.0, 2.0, 0.0, 1.0, 0.0]
    assert (last.attention.shape, last.keys.shape, last.values.shape) == ((6, 5), (2, 5, 8), (2, 5, 8))
    torch.testing.assert_close(last.attention.sum(-1), torch.ones(6, dtype=torch.float64))


def test_ties_evict_the_oldest_and_nan_comes_last() -> None:
    def score(seen: Candidates) -> Tensor:
        return torch.where(seen.positions < 3, torch.nan, 1.0)

    rnn = msrnn.MultiStateRNN(build(llama(num_hidden_layers=1)), ScoredPolicy(score=score), 4)
    state = rnn.state()
    rnn.read(tokens(1, 6), state)
    assert sorted(state.positions(0).flatten().tolist()) == [-1, 0, 1, 2, 5]


def test_copies_go_on_alike() -> None:
    rnn = msrnn.MultiStateRNN(build(llama(eos_token_id=None)), as_function(NAMES["h2o"]), 8)
    state = rnn.state(2)
    rnn.read(tokens(2, 20), state)
    more = tokens(1, 5, seed=3)
    forked, chosen = state.fork(2), state.select([1])
    logits = rnn.read(more.expand(4, -1), forked)
    torch.testing.assert_close(rnn.read(more, chosen), logits[2:3])
    torch.testing.assert_close(logits[2], logits[3])
    assert rnn.convert_state(chosen).seen.tolist() == [25]
    out = rnn.generate(more, max_new_tokens=4, do_sample=False)
    assert out.shape == (1, 9)
