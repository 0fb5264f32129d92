"""Kept states: the longest prefix is found, two kinds of memory are bounded, the least recently used state goes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from msrnn.engine.prefix_cache import PrefixCache
from tests.helpers.fake_executor import FakeExecutor, FakeState, fake

CPU = FakeExecutor()
TOKEN = 4  # bytes


@pytest.fixture
def state() -> FakeState:
    return FakeState()


def test_the_longest_prefix_is_found(state: FakeState) -> None:
    kept = PrefixCache(CPU, 10**9, 0)
    for length in (2, 5, 7):
        kept.put(range(length), state)
    kept.put([0, 1, 9], state)

    def found(*prompt: int) -> int:
        entry = kept.find_longest(prompt)
        return entry.length if entry else 0

    assert found(*range(20)) == 7
    assert found(0, 1, 2, 3, 4, 5, 0) == 5
    assert found(0, 1, 9, 9) == 3
    assert found(1, 2, 3) == 0
    assert (kept.hits, kept.misses) == (3, 1)


def held(kept: PrefixCache) -> list[list[list[int]]]:
    return [[[*entry.tokens.ids] for entry in tier.values()] for tier in kept._tiers.values()]


def places(kept: PrefixCache) -> list[list[str]]:
    return [[fake(entry.state).place for entry in tier.values()] for tier in kept._tiers.values()]


def test_a_whole_prompt_needs_its_logits(state: FakeState) -> None:
    kept = PrefixCache(CPU, 10**9, 0)
    kept.put([1, 2, 3], state)
    assert kept.find_longest([1, 2, 3]) is None
    known = FakeState(has_logits=True)
    kept.put([1, 2, 3], known)
    kept.put([1, 2, 3], state)  # does not lose them
    entry = kept.find_longest([1, 2, 3])
    assert entry is not None
    assert entry.state is known


def test_prefixes_with_one_hash_are_told_apart(state: FakeState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.engine.prefix_cache._hashes", lambda tokens: [0] * len(tokens.ids))
    kept = PrefixCache(CPU, 10**9, 0)
    kept.put([1, 2], state)
    assert kept.find_longest([3, 4, 5]) is None


def test_the_least_recently_used_goes_first(state: FakeState) -> None:
    kept = PrefixCache(CPU, 2 * (state.nbytes + TOKEN), 0)
    kept.put([1], state)
    kept.put([2], state)
    assert kept.find_longest([1, 0])
    kept.put([3], state)
    assert kept.find_longest([2, 0]) is None
    assert kept.find_longest([1, 0])
    assert kept.nbytes == 2 * (state.nbytes + TOKEN)


def test_what_no_longer_fits_on_the_device_is_kept_on_the_host(state: FakeState) -> None:
    kept = PrefixCache(FakeExecutor(device="cuda"), state.nbytes + TOKEN, state.nbytes + TOKEN)
    for token in (1, 2, 3):
        kept.put([token], state)
    assert held(kept) == [[[3]], [[2]]]
    assert places(kept) == [["device"], ["host"]]
    entry = kept.find_longest([2, 0])
    assert entry is not None
    assert held(kept) == [[[2]], [[3]]]
    assert places(kept) == [["device"], ["host"]]


def test_nothing_is_kept_without_memory(state: FakeState) -> None:
    kept = PrefixCache(CPU, 0, 0)
    assert not kept.active
    kept.put([1], state)
    assert len(kept) == 0


def test_what_prompts_share(state: FakeState) -> None:
    kept = PrefixCache(CPU, 10**9, 0)
    kept.put([1, 2, 3, 4], state)
    assert kept.find_shared_lengths([1, 2, 3, 9, 9], []) == [3]
    assert kept.find_shared_lengths([1, 2, 3, 9, 9], [[1, 2, 3, 9, 8], [1, 2, 7], [8]]) == [0, 2, 3, 4]
    assert kept.find_shared_lengths([1, 2, 3, 4], []) == [3]  # one token is always left to read
    assert kept.find_shared_lengths([7], []) == [0]


def test_shorter_prefixes_outlive_longer_ones(state: FakeState) -> None:
    """The state of a document is used as long as the states of its questions are."""
    kept = PrefixCache(CPU, 2 * (state.nbytes + 3 * TOKEN), 0)
    kept.put([1, 2], state)
    for token in range(3, 9):
        kept.put([1, 2, token], state)
        found = kept.find_longest([1, 2, token, 0])
        assert found is not None
        assert [*found.tokens.ids] == [1, 2, token]
    found = kept.find_longest([1, 2, 9, 0])
    assert found is not None
    assert [*found.tokens.ids] == [1, 2]


def test_owners_share_no_states(state: FakeState) -> None:
    kept = PrefixCache(CPU, 10**9, 0)
    kept.put([1, 2, 3], FakeState(has_logits=True), owner="a")
    for owner in ("", "b"):
        assert kept.find_longest([1, 2, 3, 4], owner) is None
        assert kept.find_shared_lengths([1, 2, 3, 9], [], owner) == []
    found = kept.find_longest([1, 2, 3, 4], "a")
    assert found is not None
    assert found.length == 3
    assert kept.find_shared_lengths([1, 2, 9], [], "a") == [2]


def test_long_prompts_take_memory_too(state: FakeState) -> None:
    """A state is small, and does not grow with what it has read; its tokens do."""
    kept = PrefixCache(CPU, 10 * state.nbytes, 0)
    long = 4 * state.nbytes // TOKEN
    for first in range(5):
        kept.put([first, *range(1, long)], state)
    assert len(kept) == 2
    assert kept.nbytes == 2 * (state.nbytes + long * TOKEN)


def archiving(device: str = "cpu") -> FakeExecutor:
    """An executor whose archives have 10 bytes for each token."""
    executor = FakeExecutor(device=device)
    executor.facts = replace(executor.facts, archived_row_nbytes=10)
    return executor


def test_archives_have_a_limit_of_their_own(state: FakeState) -> None:
    kept = PrefixCache(archiving(), 10**6, 0, archive_bytes=100)
    for first in range(3):
        kept.put([first, 1, 2, 3], state)
    assert held(kept)[0] == [[1, 1, 2, 3], [2, 1, 2, 3]]
    assert kept.archive_nbytes == 80
    kept.put([*range(11)], state)
    assert held(kept)[0] == [[1, 1, 2, 3], [2, 1, 2, 3]], "one that cannot fit evicts no other"
    kept.put([2, 1, 2, 3], state)
    assert kept.archive_nbytes == 80


@pytest.mark.parametrize("archive_bytes", [50, 10**6])
def test_archives_of_prefixes_on_the_device_count_with_those_on_the_host(archive_bytes: int, state: FakeState) -> None:
    kept = PrefixCache(archiving("cuda"), 1100, 10**6, archive_bytes=archive_bytes)
    for first in range(3):
        kept.put([first, 1], state)
    assert places(kept) == ([["device"], ["host"]] if archive_bytes == 50 else [["device"], ["host"] * 2])
    assert kept.archive_nbytes == 20 * len(kept)


def test_a_prefix_may_have_to_be_shorter(state: FakeState) -> None:
    kept = PrefixCache(CPU, 10**9, 0)
    for length in (2, 5, 7):
        kept.put(range(length), state)
    for longest, expected in ((7, 7), (6, 5), (4, 2), (1, 0)):
        entry = kept.find_longest(range(20), longest=longest)
        assert (entry.length if entry else 0) == expected
