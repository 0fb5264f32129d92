"""A draft leaves a state as if what was taken back had never been read, whatever part of it stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import msrnn
from msrnn.core.mark import Mark
from msrnn.hf.cuda_graphs import Graphs
from msrnn.hf.draft import Draft, width_of
from tests.core.test_mark import assert_same
from tests.helpers.tiny import FAMILIES, build, left_padded, llama, tokens

OPTIONS: list[dict[str, Any]] = [
    *({"policy": name, "size": 9} for name in ("tova", "h2o", "echo", "window+4")),
    {"policy": "echo", "size": [4, 30]},
    {"policy": "tova", "size": 12, "positions": "compressed"},
    {"policy": "echo", "size": 9, "state_dtype": "int8"},
]


def test_few_widths_serve_all_lengths() -> None:
    assert [width_of(columns) for columns in (1, 4, 5, 8, 9, 16, 17)] == [4, 4, 8, 8, 16, 16, 32]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral-sliding"])
def test_what_stays_is_what_was_read(options: dict[str, Any], family: str, device: str) -> None:
    """Drafts of several lengths one after the other, in a batch, each partly taken back; then the text goes on."""
    rnn = msrnn.MultiStateRNN(build(FAMILIES[family](), device), **options)
    ids, mask = left_padded(tokens(2, 40), [7, 0])
    new = tokens(2, 40, seed=3).to(device)
    state, straight = rnn.state(2), rnn.state(2)
    for one in (state, straight):
        rnn.read(ids.to(device), one, mask.to(device))
    graphs, begin = rnn.new_graphs(), 0
    for length, back in ((4, 0), (3, 2), (8, 8), (6, 1), (1, 0), (1, 1), (7, 3)):
        draft, columns = graphs.draft(state, length), new[:, begin : begin + length]
        expected = rnn.read(columns, straight.select([0, 1]))
        torch.testing.assert_close(draft.read(columns), expected, atol=1e-4, rtol=1e-4)
        draft.take_back(back)
        begin += length - back
        if length > back:
            rnn.read(columns[:, : length - back], straight)
    for row in range(2):
        assert_same(state.select([row]), straight.select([row]))
    after = tokens(2, 5, seed=9).to(device)
    torch.testing.assert_close(rnn.read(after, state), rnn.read(after, straight), atol=1e-4, rtol=1e-4)


def test_a_draft_that_is_not_filled_has_padding(device: str) -> None:
    """As a captured one has: one width serves drafts of all lengths."""
    rnn = msrnn.MultiStateRNN(build(llama(), device), "echo", 9)
    ids = tokens(1, 30).to(device)
    state, straight = rnn.state(), rnn.state()
    rnn.read(ids[:, :20], state)
    rnn.read(ids[:, :20], straight)
    draft = Draft(rnn.model, rnn.spec, state, Mark(state), width=16)
    for begin, length, back in ((20, 5, 2), (23, 3, 0), (26, 4, 3)):
        logits = draft.read(ids[:, begin : begin + length]).clone()
        fork = straight.select([0])
        torch.testing.assert_close(logits, rnn.read(ids[:, begin : begin + length], fork), atol=1e-4, rtol=1e-4)
        draft.take_back(back)
        rnn.read(ids[:, begin : begin + length - back], straight)
        assert_same(state, straight)


def test_protected_tokens_stay_protected(device: str) -> None:
    rnn = msrnn.MultiStateRNN(build(llama(), device), "tova", 9)
    ids = tokens(1, 40).to(device)
    state, straight = rnn.state(), rnn.state()
    for one in (state, straight):
        rnn.read(ids[:, :5], one, protect=True)
        rnn.read(ids[:, 5:20], one)
    draft = rnn.new_graphs().draft(state, 8)
    draft.read(ids[:, 20:28])
    draft.take_back(3)
    rnn.read(ids[:, 20:25], straight)
    assert_same(state, straight)


def test_drafts_follow_the_state_and_the_weights(device: str) -> None:
    rnn = msrnn.MultiStateRNN(build(llama(), device), "tova", 9)
    graphs = rnn.new_graphs()
    states = [rnn.spec.state(1) for _ in range(2)]
    ids = tokens(1, 20).to(device)
    for state in states:
        rnn.read(ids, state)
    first = graphs.draft(states[0], 4)
    assert graphs.draft(states[0], 4) is first
    assert graphs.draft(states[1], 4) is not first
    before = graphs.draft(states[0], 4).read(ids[:, :4]).clone()
    graphs.draft(states[0], 4).take_back(4)
    with torch.no_grad():
        for weight in rnn.model.parameters():
            weight.data = weight.data.clone().mul_(1.1)
    assert not torch.equal(graphs.draft(states[0], 4).read(ids[:, :4]), before)


@pytest.mark.gpu
def test_drafts_are_captured() -> None:
    rnn = msrnn.MultiStateRNN(build(llama(), "cuda"), "echo", 9)
    graphs: Graphs = rnn.new_graphs()
    state = rnn.spec.state(1)
    draft = graphs.draft(state, 6)
    assert draft.captured
    before = torch.cuda.memory_allocated()
    for length in (5, 6, 7, 8) * 5:
        assert graphs.draft(state, length) is draft
        draft.read(tokens(1, length).cuda())
        draft.take_back(length - 1)
    assert torch.cuda.memory_allocated() - before < 2**20
