from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from msrnn.backends import resolve_backend
from msrnn.bound import Bound
from msrnn.core.scores import Scoring
from msrnn.core.slots import Growing, LayerShape, Slots
from msrnn.layer import attend, attend_unbounded, plain_attention
from msrnn.policy import Policy
from tests.helpers.layers import random_tokens

SHAPE = LayerShape(4, 2, 16, 16, torch.float32, torch.device("cpu"))
SCORING = Scoring(0.25)


def test_chunks_of_a_block_are_recorded_and_change_nothing() -> None:
    query, key, value = random_tokens(2, 4, 2, 21, 16, "cpu")
    backend, outputs, recorded = resolve_backend("torch", query.device), [], {}
    for chunk in (21, 8):
        slots = Slots(2, SHAPE, Bound(Policy.parse("tova"), 6))
        times: list[Tensor] = []

        def record(_: Tensor, evicted_at: Tensor, times: list[Tensor] = times) -> None:
            times.append(evicted_at)

        position = slots.advance(21, None)
        outputs.append(attend(slots, query, key, value, position, SCORING, chunk, backend, record))
        recorded[chunk] = [tuple(found.shape) for found in times]
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=1e-5)
    assert recorded == {21: [(2, 1, 7 + 21)], 8: [(2, 1, 7 + 7)] * 3}


@pytest.mark.parametrize("padding", [0, 3])
def test_a_layer_that_evicts_nothing_is_causal_attention(padding: int) -> None:
    query, key, value = random_tokens(1, 4, 2, 12, 16, "cpu")
    real = torch.arange(12)[None] >= padding
    growing = Growing(1, SHAPE)
    parts = [
        attend_unbounded(
            growing, a, query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], real[:, a:b] if padding else None, SCORING
        )
        for a, b in ((0, 7), (7, 8), (8, 12))
    ]
    seen = [x[:, :, padding:] for x in (query, key, value)]
    expected = scaled_dot_product_attention(seen[0], seen[1], seen[2], is_causal=True, scale=0.25, enable_gqa=True)
    found = torch.cat(parts, dim=1)[:, padding:].transpose(1, 2)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_attention_with_and_without_its_weights() -> None:
    """SDPA gives no weights; the sum over the weights does what it does."""
    query, key, value = random_tokens(1, 4, 2, 9, 16, "cpu")
    fast, none = plain_attention(query, key, value, None, SCORING)
    slow, weights = plain_attention(query, key, value, None, SCORING, weights=True)
    assert none is None
    assert weights is not None
    torch.testing.assert_close(slow, fast, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 9))
    assert (weights.triu(1) == 0).all()


def test_a_sink_takes_attention_from_the_tokens() -> None:
    query, key, value = random_tokens(1, 4, 2, 9, 16, "cpu")
    sinks = torch.tensor([-torch.inf, 0.0, 0.0, 30.0])
    output, weights = plain_attention(query, key, value, None, Scoring(0.25, sinks=sinks), weights=True)
    assert weights is not None
    total = weights.sum(-1)
    torch.testing.assert_close(total[:, 0], torch.ones(1, 9))
    assert (total[:, 1] < 1).all()
    assert output[:, :, 3].abs().max() < 1e-6
