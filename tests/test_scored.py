from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import msrnn
from msrnn.errors import UsageError
from msrnn.scored import ScoredPolicy
from tests.helpers.tiny import build, llama, tokens


def test_what_is_refused(tmp_path: Path) -> None:
    model, policy = build(llama()), ScoredPolicy(score=lambda seen: -seen.keys.norm(dim=-1).mean(0))
    with pytest.raises(UsageError, match="backend='numba': has no policies with a Python function; use 'torch'"):
        msrnn.MultiStateRNN(model, policy, 8, backend="numba")
    rnn = msrnn.MultiStateRNN(model, policy, 8)
    state = rnn.state()
    rnn.read(tokens(1, 20), state)
    with pytest.raises(UsageError, match=r"a file cannot hold its Python function; keep a copy with state\.fork"):
        state.save(tmp_path / "state")
    assert not (tmp_path / "state").exists()
    with pytest.raises(UsageError, match=r"the engine cannot have a Python function; use MultiStateRNN\.generate"):
        msrnn.Engine(rnn, slots=2)
    with pytest.raises(UsageError, match="results under a Python function cannot be stored"):
        _ = policy.numbers
    other = msrnn.MultiStateRNN(model, ScoredPolicy(score=lambda seen: seen.attention.mean(0)), 8)
    for use in (other.convert_state, lambda state: other.read(tokens(1, 2), state)):
        with pytest.raises(UsageError, match="the state was made with policy 'score="):
            use(state)
    wrongs: list[Any] = [lambda seen: seen.attention, lambda seen: 1.0]
    for wrong in wrongs:
        broken = msrnn.MultiStateRNN(model, ScoredPolicy(score=wrong), 8)
        with pytest.raises(UsageError, match=r"its score returned .*must be a tensor"):
            broken.read(tokens(1, 20), broken.state())
    for fields, message in (({"score": 7}, "score=7: must be a function"), ({"recent": float("inf")}, "recent=inf")):
        with pytest.raises(UsageError, match=message):
            ScoredPolicy(**{"score": len, **fields})  # type: ignore[arg-type]
