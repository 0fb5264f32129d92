"""The algorithm as it was published is the one that msrnn computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import msrnn
from benchmarks.published import NAME, Published, cache_of
from msrnn.evaluation.benchmark.contenders import attending, setup
from tests.helpers.tiny import build, llama, tokens


@torch.no_grad()
def test_steps_agree_with_msrnn() -> None:
    model = build(llama())
    ids, cache = tokens(2, 40), cache_of(model, 9)
    with attending(model, NAME):
        parts = []
        for t in range(40):
            place = torch.full((2, 1), t)
            out = model(input_ids=ids[:, t : t + 1], position_ids=place, past_key_values=cache, use_cache=True)
            parts.append(out.logits)
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    state = rnn.state(2)
    torch.testing.assert_close(torch.cat(parts, dim=1), rnn.read(ids, state), atol=1e-4, rtol=1e-4)
    for layer, slots in zip(cache.layers, state.layers, strict=True):
        order = slots.position[:, 0].argsort(-1)[:, 1:]  # the spare slot comes first
        kept = slots.keys.gather(2, order[:, None, :, None].expand(-1, 2, -1, 8))
        torch.testing.assert_close(layer.keys, kept, atol=1e-4, rtol=1e-4)


def test_as_a_contender() -> None:
    made = setup(build(llama()), 64)
    contender = Published(made, 7)
    assert contender.nbytes == 7 * 2 * 2 * 2 * 8 * 4
    with contender.stepping(3, 7) as step:
        found: Any = step()
        assert found.logits.shape == (3, 1, 97)
        step()


def test_one_token_at_a_time() -> None:
    model = build(llama())
    with attending(model, NAME), pytest.raises(ValueError, match="one token"):
        model(input_ids=tokens(1, 3), past_key_values=cache_of(model, 9))
