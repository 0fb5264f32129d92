"""Tokens that were taken back leave no trace: the state is that of a text without them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import msrnn
from msrnn.errors import UsageError
from tests.helpers.tiny import FAMILIES, build, hybrid, left_padded, llama, tokens

OPTIONS: list[dict[str, Any]] = [
    *({"policy": name, "size": 9} for name in ("tova", "h2o", "echo", "window+4", "random", "echo~20")),
    {"policy": "echo", "size": [4, None]},
    {"policy": "full", "size": None},
    {"policy": "tova", "size": 9, "positions": "compressed"},
    {"policy": "echo+1~20", "size": 12, "positions": "fitted", "state_dtype": "int8"},
    {"policy": "echo", "size": 9, "backend": "torch", "state_dtype": "fp8"},
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama())


def assert_same(one: msrnn.MultiState, other: msrnn.MultiState) -> None:
    """One sequence each: the same positions with the same importances, in whatever slots."""
    assert (one.seen.tolist(), one.protected) == (other.seen.tolist(), other.protected)
    for index, layers in enumerate(zip(one.layers, other.layers, strict=True)):
        (mine, order), (theirs, their_order) = (state.positions(index).sort(-1) for state in (one, other))
        held, their_held = mine[0] >= 0, theirs[0] >= 0
        assert mine[0][held].tolist() == theirs[0][their_held].tolist()
        if getattr(layers[0], "importance", None) is not None:
            importance = layers[0].importance.gather(-1, order)[0][held]
            expected = layers[1].importance.gather(-1, their_order)[0][their_held]
            torch.testing.assert_close(importance, expected, atol=1e-5, rtol=1e-4)


@settings(max_examples=15)
@given(
    options=st.sampled_from(OPTIONS),
    family=st.sampled_from(["llama", "mistral-sliding", "gpt-oss"]),
    before=st.integers(1, 30),
    widths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    back=st.tuples(st.integers(0, 48), st.integers(0, 48)),
    padding=st.integers(0, 29),
    block=st.integers(2, 20),
)
def test_tokens_that_were_taken_back_were_never_read(
    options: dict[str, Any],
    family: str,
    before: int,
    widths: list[int],
    back: tuple[int, int],
    padding: int,
    block: int,
) -> None:
    if family == "gpt-oss" and options.get("positions"):
        options = {**options, "positions": "original"}
    rnn = msrnn.MultiStateRNN(build(FAMILIES[family]()), **options, block=block)
    length = sum(widths)
    ids, mask = left_padded(tokens(2, before + length), [min(padding, before - 1), 0])
    counts = [min(n, length) for n in back]
    state = rnn.state(2)
    rnn.read(ids[:, :before], state, mask[:, :before])
    state.mark()
    at = before
    for width in widths:
        read = rnn.step if width == 1 else rnn.read
        read(ids[:, at : at + width], state, mask[:, at : at + width])
        at += width
    state.rewind(counts)
    new = tokens(1, 8, seed=5)
    together = torch.cat([rnn.step(new[:, :1].expand(2, -1), state), rnn.read(new[:, 1:].expand(2, -1), state)], dim=1)
    for row, count in enumerate(counts):
        alone = rnn.state()
        rnn.read(ids[row : row + 1, : at - count], alone, mask[row : row + 1, : at - count])
        expected = rnn.read(new, alone)
        torch.testing.assert_close(together[row : row + 1], expected, atol=1e-4, rtol=1e-4)
        assert_same(state.select([row]), alone)


@pytest.mark.parametrize("backend", ["torch", "numba", pytest.param("triton", marks=pytest.mark.slow)])
def test_going_back_again_and_again(backend: str, device: str) -> None:
    """The mark stays where it is, and tokens that were taken back are no part of what is taken back next."""
    if backend == "numba" and device == "cuda":
        pytest.skip("numba computes on a CPU")
    rnn = msrnn.MultiStateRNN(build(llama(), device), "echo", 9, backend=backend)
    ids = tokens(1, 60).to(device)
    state, straight = rnn.state(), rnn.state()
    rnn.read(ids[:, :20], state)
    state.mark()
    rnn.read(ids[:, 20:35], state)
    state.rewind(5)
    rnn.read(ids[:, 40:50], state)
    state.rewind(8)
    rnn.step(ids[:, 55:56], state)
    rnn.read(torch.cat([ids[:, :30], ids[:, 40:42], ids[:, 55:56]], dim=1), straight)
    assert_same(state, straight)
    assert state.columns == 33
    state.rewind(13)
    assert (state.seen.tolist(), state.columns) == ([20], 20)
    with pytest.raises(UsageError, match="0 tokens were read since the mark"):
        state.rewind(1)


def test_sequences_that_go_back_by_different_numbers_have_padding(model: PreTrainedModel) -> None:
    """An unbounded layer keeps the columns of all: one token alone must not see those that its sequence took back."""
    rnn = msrnn.MultiStateRNN(model, "full", None)
    ids = tokens(2, 20)
    state, straight = rnn.state(2), rnn.state()
    state.mark()
    rnn.read(ids, state)
    state.rewind([6, 0])
    rnn.read(ids[:1, :14], straight)
    new = tokens(2, 1, seed=5)
    torch.testing.assert_close(rnn.step(new, state)[:1], rnn.step(new[:1], straight), atol=1e-4, rtol=1e-4)


def test_a_mark_that_moves_uses_its_copies_again(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "h2o", 9)
    ids = tokens(1, 60)
    state, straight = rnn.state(), rnn.state()
    for start in range(0, 40, 10):
        state.mark()
        rnn.read(ids[:, start : start + 12], state)
        state.rewind(2)
    rnn.read(ids[:, :40], straight)
    assert_same(state, straight)
    state.unmark()
    with pytest.raises(UsageError, match="has no mark"):
        state.rewind(1)


def begin_protected(model: PreTrainedModel) -> tuple[msrnn.MultiStateRNN, torch.Tensor, Any, Any]:
    """Two states that have read and protected the first four tokens, and the first of them marked."""
    rnn, ids = msrnn.MultiStateRNN(model, "tova", 12), tokens(1, 60)
    state, straight = rnn.state(), rnn.state()
    for one in (state, straight):
        rnn.read(ids[:, :4], one, protect=True)
    state.mark()
    return rnn, ids, state, straight


def test_protected_tokens_that_were_taken_back_are_not_protected(model: PreTrainedModel) -> None:
    rnn, ids, state, straight = begin_protected(model)
    rnn.read(ids[:, 4:9], state, protect=True)
    rnn.read(ids[:, 9:40], state)
    state.rewind(33)
    rnn.read(ids[:, 4:7], straight, protect=True)
    assert state.protected == [[(0, 7)]] == straight.protected
    assert_same(state, straight)


def test_what_was_protected_then_is_spared_when_it_is_read_again(model: PreTrainedModel) -> None:
    """Between the pass and the way back the protection ended: that changes nothing of what was evicted."""
    rnn, ids, state, straight = begin_protected(model)
    rnn.read(ids[:, 4:40], state)
    state.release()
    state.rewind(3)
    rnn.read(ids[:, 4:37], straight)
    assert set(range(4)) <= set(state.positions(0).flatten().tolist())
    straight.release()
    assert_same(state, straight)


def test_a_smaller_size_goes_back_too(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "echo", 12)
    ids = tokens(1, 40)
    state, straight = rnn.state(size=6), rnn.state(size=6)
    rnn.read(ids[:, :20], state)
    state.mark()
    rnn.read(ids[:, 20:], state)
    state.rewind(10)
    rnn.read(ids[:, :30], straight)
    assert_same(state, straight)


def test_copies_have_no_mark(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    state = rnn.state()
    rnn.read(tokens(1, 12), state)
    state.mark()
    rnn.read(tokens(1, 12), state)
    for other in (
        state.fork(2),
        state.select([0]),
        state.to("cpu"),
        copy.deepcopy(state),
        msrnn.MultiState.cat([state]),
    ):
        assert other.marked is None
    state.rewind(12)
    state.reset()
    assert state.marked is None


def test_a_state_that_changed_behind_its_mark_is_refused(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    state = rnn.state()
    rnn.read(tokens(1, 12), state)
    state.mark()
    rnn.read(tokens(1, 3), state.view(slice(0, 1)))
    with pytest.raises(UsageError, match="changed since its mark"):
        state.rewind(1)
    with pytest.raises(UsageError, match=r"tokens=\[1, 2\]"):
        state.rewind([1, 2])
    with pytest.raises(UsageError, match="tokens=-1"):
        state.rewind(-1)


def test_an_interrupted_state_is_neither_marked_nor_taken_back(model: PreTrainedModel) -> None:
    state = msrnn.MultiStateRNN(model, "tova", 9).state()
    state.mark()
    state.whole = False
    with pytest.raises(UsageError, match="interrupted"):
        state.mark()
    with pytest.raises(UsageError, match="interrupted"):
        state.rewind(0)


def test_what_cannot_go_back_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(UsageError, match="linear attention"):
        msrnn.MultiStateRNN(hybrid(), "tova", 9).state().mark()
    with pytest.raises(UsageError, match="archive"):
        msrnn.MultiStateRNN(model, "tova", 9, recall=4).state().mark()
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    state = rnn.state()
    state.mark()
    with pytest.raises(UsageError, match="eviction times"):
        rnn.read(tokens(1, 12), state, record=lambda layer: lambda position, evicted_at: None)
