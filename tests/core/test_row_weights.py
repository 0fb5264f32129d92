"""The numbers beside KV rows. Their use is tested with every backend, in test_identities.py and beside the kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import msrnn
from msrnn.core.quantization import Rows
from msrnn.core.row_weights import compute_norms, draw_weights, scramble
from tests.helpers.shards import run_in_turns
from tests.helpers.tiny import build, llama, tokens


def test_numbers_are_scrambled_as_by_murmurhash() -> None:
    """Known results of the finalizer; also at the ends of the range, and by tensors as by Python's numbers."""
    numbers = [0, 1, 2, 0xFFFFFFFF, 0x80000000, 123456789]
    expected = []
    for number in numbers:
        number = (number ^ number >> 16) * 0x85EBCA6B % 2**32
        number = (number ^ number >> 13) * 0xC2B2AE35 % 2**32
        expected.append(number ^ number >> 16)
    assert expected[:4] == [0, 0x514E28B7, 0x30F4C306, 0x81F16F39]
    assert [scramble(number) for number in numbers] == expected
    assert scramble(torch.tensor(numbers)).tolist() == expected


def test_drawn_weights_are_uniform_and_unlike_in_heads_and_layers() -> None:
    position = torch.arange(20_000, dtype=torch.int32)[None, None]
    drawn = torch.cat([draw_weights(position, layer, range(2)) for layer in range(2)], 1)[0]
    assert drawn.dtype == torch.float32
    assert 0 <= drawn.min() < 1e-3
    assert 1 - 1e-3 < drawn.max() < 1
    assert torch.equal(drawn * 2**24, (drawn * 2**24).floor()), "no rounding, so that every backend has the same ones"
    assert drawn.mean(1) == pytest.approx([0.5] * 4, abs=0.01)
    assert drawn.var(1) == pytest.approx([1 / 12] * 4, abs=0.002)
    numbers = [*drawn, drawn[0].roll(1)]
    correlations = torch.corrcoef(torch.stack(numbers)) - torch.eye(5)
    assert correlations.abs().max() < 0.03
    last = torch.tensor([[[0, 2**31 - 2**20, -1]]], dtype=torch.int32)
    assert bool(((draw_weights(last, 99, range(3)) >= 0) & (draw_weights(last, 99, range(3)) < 1)).all())


def test_drawn_weights_do_not_depend_on_the_batch_or_the_heads_beside() -> None:
    position = torch.randint(0, 10_000, (3, 1, 50), dtype=torch.int32)
    drawn = draw_weights(position, 5, range(4))
    assert torch.equal(drawn[1:2, 2:3, 7:8], draw_weights(position[1:2, :, 7:8], 5, range(2, 3)))
    assert torch.equal(drawn, draw_weights(position.expand(3, 4, 50), 5, range(4)))


def test_norms_are_those_of_all_heads_of_a_group() -> None:
    value = torch.randn(2, 4, 5, 8)
    norms = compute_norms(Rows(value, None), 2, None)
    torch.testing.assert_close(norms[1, 1, 3], value[1, 2:, 3].norm())
    halves = run_in_turns(2, lambda shards: compute_norms(Rows(value.chunk(2, 1)[shards.rank], None), 1, shards))
    for half in halves:
        torch.testing.assert_close(half, compute_norms(Rows(value, None), 1, None))


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_random_evictions_of_a_model(backend: str) -> None:
    """Layers and KV heads keep other tokens; the first, protected ones and no more than the size are kept."""
    rnn = msrnn.MultiStateRNN(build(llama()), "random+2", 16, backend=backend)
    state = rnn.state()
    rnn.read(tokens(1, 20), state)
    rnn.read(tokens(1, 4), state, protect=True)
    rnn.read(tokens(1, 300), state)
    for token in tokens(1, 20).split(1, 1):
        rnn.step(token, state)
    held = [frozenset(row) - {-1} for i in range(2) for row in state.positions(i)[0].tolist()]
    assert len(set(held)) == 4
    for positions in held:
        assert len(positions) == 16
        assert {0, 1, 20, 21, 22, 23} < positions
    expected = [draw_weights(torch.arange(344)[None, None], layer, range(2))[0] for layer in range(2)]
    for number, positions in enumerate(held):
        weights = expected[number // 2][number % 2]
        free = set(range(344)) - {0, 1, 20, 21, 22, 23, 343}
        best = sorted(free, key=lambda j: float(weights[j]))[-10:]
        # The newest token cannot have been evicted before it came; all others are those with the largest numbers.
        assert positions - {343} <= {0, 1, 20, 21, 22, 23, *best}


def test_a_random_state_is_saved_and_forged_numbers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    rnn = msrnn.MultiStateRNN(build(llama()), "random", 8)
    state, ids = rnn.state(2), tokens(2, 40)
    rnn.read(ids[:, :30], state)
    state.save(path)
    fork = state.fork(2)
    expected = rnn.read(ids[:, 30:], state)
    torch.testing.assert_close(rnn.read(ids[:, 30:], rnn.load_state(path)), expected)
    torch.testing.assert_close(rnn.read(ids[[0, 0, 1, 1], 30:], fork)[::2], expected)
    with pytest.raises(msrnn.UsageError, match="policy 'random'"):
        msrnn.MultiStateRNN(rnn.model, "window", 8).load_state(path)
    state.layers[1].row_weight[0, 1] += 0.5
    with pytest.raises(msrnn.UsageError, match="is not the weight of the stored row"):
        state.save(path)
