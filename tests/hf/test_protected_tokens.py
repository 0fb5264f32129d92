"""Protected tokens through the whole model: read, generate, saved and forked states, refusals."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import msrnn
from msrnn.core.slots import Slots
from tests.helpers.tiny import build, llama, tokens

SIZE = 12
POLICIES = ["tova", "tova-head", "window", "window+2", "h2o", "echo", "echo~20"]


def held(state: msrnn.MultiState, sequence: int = 0) -> list[set[int]]:
    """Positions that each layer and group holds."""
    layers = [layer for layer in state.layers if isinstance(layer, Slots)]
    return [set(group) - {-1} for layer in layers for group in layer.position[sequence].tolist()]


def read_parts(rnn: msrnn.MultiStateRNN, ids: Tensor, begin: int, end: int, cuts: tuple[int, ...] = ()) -> Any:
    """Logits and state of a text whose tokens begin..end are protected; other cuts must not matter."""
    state, ids = rnn.state(ids.shape[0]), ids.to(rnn.device)
    edges = sorted({0, begin, end, ids.shape[1], *cuts})
    parts = [rnn.read(ids[:, a:b], state, protect=begin <= a < end) for a, b in pairwise(edges)]
    return torch.cat(parts, dim=1), state


@pytest.mark.parametrize("policy", POLICIES)
def test_protected_tokens_stay(policy: str, device: str) -> None:
    rnn = msrnn.MultiStateRNN(build(llama()).to(device), policy, SIZE)
    logits, state = read_parts(rnn, tokens(1, 60), 10, 15)
    assert state.protected == [[(10, 15)]]
    assert all({10, 11, 12, 13, 14} <= positions for positions in held(state))
    assert all(len(positions) <= SIZE for positions in held(state))
    assert not all({20, 21, 22, 23, 24} <= positions for positions in held(state)), "others may go"
    again, _ = read_parts(rnn, tokens(1, 60), 10, 15, cuts=(3, 11, 14, 33, 34))
    torch.testing.assert_close(again, logits, atol=1e-4, rtol=1e-4)


def test_a_scored_policy_spares_them() -> None:
    newest_attention = msrnn.ScoredPolicy(score=lambda rows: rows.attention.mean(0))
    ids = tokens(1, 50)
    mine, theirs = (msrnn.MultiStateRNN(build(llama()), policy, SIZE) for policy in (newest_attention, "tova"))
    (found, state), (expected, other) = (read_parts(rnn, ids, 10, 15) for rnn in (mine, theirs))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert held(state) == held(other)


@pytest.mark.parametrize("policy", ["tova", "echo"])
def test_reading_is_stepping(policy: str, device: str) -> None:
    rnn, ids = msrnn.MultiStateRNN(build(llama()).to(device), policy, SIZE), tokens(1, 50).to(device)
    whole, state = read_parts(rnn, ids, 5, 9)
    stepped = rnn.state()
    rows = [rnn.read(ids[:, t : t + 1], stepped, protect=5 <= t < 9) for t in range(50)]
    torch.testing.assert_close(torch.cat(rows, dim=1), whole, atol=1e-4, rtol=1e-4)
    assert held(stepped) == held(state)
    assert stepped.protected == state.protected


def test_release_gives_the_tokens_back_to_the_policy() -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), "window", SIZE)
    _, state = read_parts(rnn, tokens(1, 30), 4, 8)
    assert {4, 5, 6, 7} <= held(state)[0]
    state.release()
    assert state.protected == [[]]
    rnn.read(tokens(1, 20), state)
    assert held(state)[0] == set(range(38, 50))


def test_sequences_of_a_batch_protect_their_own_tokens() -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), "window", SIZE)
    state, ids = rnn.state(2), tokens(2, 6)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    rnn.read(ids, state, mask, protect=True)
    assert state.protected == [[(0, 3)], [(0, 6)]]
    rnn.read(tokens(2, 40), state)
    assert held(state, 0)[0] == {0, 1, 2, *range(34, 43)}
    assert held(state, 1)[0] == {*range(6), *range(40, 46)}
    assert state.select([1]).protected == [[(0, 6)]]
    assert state.fork(2).protected == [[(0, 3)]] * 2 + [[(0, 6)]] * 2
    assert msrnn.MultiState.cat([state.select([1]), state.select([0])]).protected == [[(0, 6)], [(0, 3)]]
    assert state.cpu().protected == state.protected


def test_too_many_are_refused_before_a_token_is_read() -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), "tova", SIZE)
    most = SIZE - 1 - rnn.spec.bounds[0].recent  # type: ignore[union-attr]
    state = rnn.state()
    with pytest.raises(ValueError, match=f"{most + 1} tokens: {most} fit"):
        rnn.read(tokens(1, most + 1), state, protect=True)
    with pytest.raises(ValueError, match=f"30 tokens: {most} fit"):
        rnn.generate(tokens(1, 30), state=state, protect="prompt", max_new_tokens=2)
    assert (state.seen.tolist(), state.protected) == ([0], [[]])
    rnn.read(tokens(1, most), state, protect=True)
    with pytest.raises(ValueError, match=f"1 tokens: 0 fit.*{most} are protected already"):
        rnn.read(tokens(1, 1), state, protect=True)
    rnn.read(tokens(1, 40), state)
    assert set(range(most)) <= held(state)[0]


def stop(*_: Any, **__: Any) -> None:
    raise RuntimeError("before a layer")


def test_an_unread_token_is_not_protected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), "window", SIZE)
    state = rnn.state()
    with monkeypatch.context() as patch:
        patch.setattr(rnn.model, "forward", stop)
        with pytest.raises(RuntimeError, match="before a layer"):
            rnn.read(tokens(1, 4), state, protect=True)
    state.whole = True  # no layer has read anything
    assert state.protected == [[]]
    rnn.read(tokens(1, 4), state, protect=True)
    state.save(tmp_path / "state")
    state.release()
    rnn.read(tokens(1, 26), state)
    assert held(state)[0] == set(range(18, 30))


def test_generate_protects_the_prompt() -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), "window", SIZE)
    state = rnn.state()
    rnn.read(tokens(1, 20), state)
    answer = rnn.generate(tokens(1, 5), state=state, protect="prompt", max_new_tokens=30, do_sample=False)
    assert answer.shape[1] == 35
    assert state.protected == [[(20, 25)]]
    assert set(range(20, 25)) <= held(state)[0]
    with pytest.raises(ValueError, match=r"protect='all'.*none, prompt"):
        rnn.generate(tokens(1, 5), protect="all", max_new_tokens=3)


def test_beams_protect_the_prompt() -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), "window", SIZE)
    state = rnn.state()
    answer = rnn.generate(
        tokens(1, 5), state=state, protect="prompt", num_beams=3, max_new_tokens=30, min_new_tokens=30
    )
    assert answer.shape[1] == 35
    assert state.protected == [[(0, 5)]]
    assert set(range(5)) <= held(state)[0]


def test_several_answers_protect_the_prompt() -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), "window", SIZE)
    how: dict[str, Any] = {"max_new_tokens": 40, "min_new_tokens": 40}
    one = rnn.generate(tokens(1, 5), protect="prompt", do_sample=False, **how)
    two = rnn.generate(tokens(1, 5), protect="prompt", do_sample=True, top_k=1, num_return_sequences=2, **how)
    assert two.tolist() == [one[0].tolist()] * 2
    assert rnn.generate(tokens(1, 5), do_sample=False, **how).tolist() != one.tolist()


def test_a_full_model_evicts_nothing_anyway() -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), "full", None)
    state = rnn.state()
    rnn.read(tokens(1, 9), state, protect=True)
    assert state.protected == [[]]
