"""Kept states: the longest prefix is found, two kinds of memory are bounded, the least recently used state goes."""

from __future__ import annotations

import pytest
import torch
from tiny import build, llama

import msrnn
from msrnn.engine.prefix_states import PrefixStates

CPU = torch.device("cpu")


@pytest.fixture
def state() -> msrnn.MultiState:
    return msrnn.MultiStateRNN(build(llama(), "cpu"), "tova", 9).state()


def test_the_longest_prefix_is_found(state: msrnn.MultiState) -> None:
    kept = PrefixStates(CPU, 10**9, 0)
    for length in (2, 5, 7):
        kept.put(range(length), state)
    kept.put([0, 1, 9], state)

    def found(*prompt: int) -> int:
        entry = kept.longest(prompt)
        return len(entry.tokens) if entry else 0

    assert found(*range(20)) == 7
    assert found(0, 1, 2, 3, 4, 5, 0) == 5
    assert found(0, 1, 9, 9) == 3
    assert found(1, 2, 3) == 0
    assert (kept.hits, kept.misses) == (3, 1)


def test_a_whole_prompt_needs_its_logits(state: msrnn.MultiState) -> None:
    kept = PrefixStates(CPU, 10**9, 0)
    kept.put([1, 2, 3], state)
    assert kept.longest([1, 2, 3]) is None
    kept.put([1, 2, 3], state, torch.ones(4))
    kept.put([1, 2, 3], state)  # does not lose them
    entry = kept.longest([1, 2, 3])
    assert entry is not None
    assert torch.equal(entry.logits, torch.ones(4))  # type: ignore[arg-type]


def test_prefixes_with_one_hash_are_told_apart(state: msrnn.MultiState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.engine.prefix_states._hashes", lambda tokens: [0] * len(tokens))
    kept = PrefixStates(CPU, 10**9, 0)
    kept.put([1, 2], state)
    assert kept.longest([3, 4, 5]) is None


def test_the_least_recently_used_goes_first(state: msrnn.MultiState) -> None:
    kept = PrefixStates(CPU, 2 * state.nbytes, 0)
    kept.put([1], state)
    kept.put([2], state)
    assert kept.longest([1, 0])
    kept.put([3], state)
    assert kept.longest([2, 0]) is None
    assert kept.longest([1, 0])
    assert kept.nbytes == 2 * state.nbytes


def test_what_no_longer_fits_on_the_device_is_kept_on_the_host(state: msrnn.MultiState) -> None:
    """`meta` stands for a device that is not the host."""
    kept = PrefixStates(torch.device("meta"), state.nbytes, state.nbytes)
    for token in (1, 2, 3):
        kept.put([token], state)
    assert [[entry.tokens for entry in tier.values()] for tier in kept._tiers.values()] == [[(3,)], [(2,)]]
    entry = kept.longest([2, 0])
    assert entry is not None
    assert entry.state.device.type == "meta"
    assert [[entry.tokens for entry in tier.values()] for tier in kept._tiers.values()] == [[(2,)], [(3,)]]


def test_nothing_is_kept_without_memory(state: msrnn.MultiState) -> None:
    kept = PrefixStates(CPU, 0, 0)
    assert not kept.active
    kept.put([1], state)
    assert len(kept) == 0


def test_what_prompts_share(state: msrnn.MultiState) -> None:
    kept = PrefixStates(CPU, 10**9, 0)
    kept.put([1, 2, 3, 4], state)
    assert kept.shared_lengths([1, 2, 3, 9, 9], []) == [3]
    assert kept.shared_lengths([1, 2, 3, 9, 9], [[1, 2, 3, 9, 8], [1, 2, 7], [8]]) == [0, 2, 3, 4]
    assert kept.shared_lengths([1, 2, 3, 4], []) == [3]  # one token is always left to read
    assert kept.shared_lengths([7], []) == [0]


def test_shorter_prefixes_outlive_longer_ones(state: msrnn.MultiState) -> None:
    """The state of a document is used as long as the states of its questions are."""
    kept = PrefixStates(CPU, 2 * state.nbytes, 0)
    kept.put([1, 2], state)
    for token in range(3, 9):
        kept.put([1, 2, token], state)
        found = kept.longest([1, 2, token, 0])
        assert found is not None
        assert found.tokens == (1, 2, token)
    found = kept.longest([1, 2, 9, 0])
    assert found is not None
    assert found.tokens == (1, 2)
