"""Learned row weights of a layer. test_identities.py compares their use with the definition, in every backend."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from msrnn.bound import Bound
from msrnn.core.buffers import LayerShape
from msrnn.core.quantization import Rows, quantize
from msrnn.core.rope import Rope
from msrnn.core.shards import Shards
from msrnn.core.slots import Slots
from msrnn.core.weight_network import MOST_EXPONENT, WeightNetwork
from msrnn.core.weights_file import HeadShape
from msrnn.errors import UsageError
from msrnn.policy import Policy
from msrnn.reference import recurrent
from tests.helpers.networks import random_network
from tests.helpers.shards import run_in_turns

ROPE = Rope(torch.tensor([1.0, 0.1, 0.01]), start=2)
LEARNED = "x.safetensors"


def rows(kv_heads: int = 2, length: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(2, kv_heads, length, 8, generator=draw), torch.randn(2, kv_heads, length, 6, generator=draw)


def weigh(
    network: WeightNetwork, key: Tensor, value: Tensor, groups: int, position: Tensor | None = None, *shards: Shards
) -> Tensor:
    position = torch.arange(key.shape[2])[None, None].expand(2, 1, -1) if position is None else position
    joint = shards[0] if shards and groups == 1 else None
    return network.weigh(Rows(key, None), Rows(value, None), position, groups, shards[0] if shards else None, joint)


def test_a_weight_by_hand() -> None:
    """One hidden number, which gelu leaves as it is; the norm of the value is 5, and g is 1 + 2 · 30."""
    network = WeightNetwork(
        mean=torch.tensor([[1.0, 0.0, 0.0]]),
        scale=torch.tensor([[2.0, 1.0, 1.0]]),
        hidden=torch.tensor([[[3.0, 0.0, 0.0]]]),
        hidden_bias=torch.tensor([[-6.0]]),
        output=torch.tensor([[0.1]]),
        output_bias=torch.tensor([-2.0]),
        alpha=torch.tensor(2.0),
    )
    key, value = torch.tensor([[[[25.0]]]]), torch.tensor([[[[3.0, -4.0]]]])
    weight = network.weigh(Rows(key, None), Rows(value, None), torch.zeros(1, 1, 1), 1, None, None)
    torch.testing.assert_close(weight, (5 * torch.tensor([[[0.1 * 30 - 2]]]).exp()).sqrt())


def test_the_same_row_weighs_the_same_at_every_position() -> None:
    network = random_network(HeadShape(2, 8, 6), rope=ROPE)
    key, value = rows(length=1)
    plain = weigh(network, key, value, 2, torch.zeros(2, 1, 1, dtype=torch.int32))
    for position in (1, 1000, 100_000):
        moved = torch.full((2, 1, 1), position, dtype=torch.int32)
        rotated = ROPE.rotate(key, -ROPE.angle(moved, torch.zeros_like(moved)))
        assert not torch.allclose(rotated, key, atol=0.1)
        torch.testing.assert_close(weigh(network, rotated, value, 2, moved), plain, rtol=1e-4, atol=1e-5)


def test_a_group_has_the_mean_of_its_heads_and_their_norm() -> None:
    network = random_network(HeadShape(2, 8, 6))
    key, value = rows()
    alone, together = weigh(network, key, value, 2), weigh(network, key, value, 1)
    graded = alone.log() * network.alpha - value.norm(dim=-1).log()
    expected = graded.mean(1, keepdim=True) + value.square().sum((1, 3)).sqrt().log()[:, None]
    torch.testing.assert_close(together.log() * network.alpha, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("per", ["layer", "head"])
def test_processes_that_share_the_heads(per: str) -> None:
    network, (key, value) = random_network(HeadShape(4, 8, 6), rope=ROPE), rows(4)
    expected = weigh(network, key, value, 1 if per == "layer" else 4)

    def run(shards: Shards) -> Tensor:
        keys, values = (x.chunk(2, 1)[shards.rank] for x in (key, value))
        return weigh(network, keys, values, 1 if per == "layer" else 2, None, shards)

    parts = run_in_turns(2, run)
    for part in [torch.cat(parts, 1)] if per == "head" else parts:
        torch.testing.assert_close(part, expected)


def test_numbers_stay_finite_and_only_nan_is_nan() -> None:
    network = random_network(HeadShape(2, 8, 6), rope=ROPE)
    key, value = rows()
    value[0, :, 1] = 0
    key[0, :, 2], value[0, :, 2] = 3e38, -3e38
    key[0, :, 3], value[0, :, 3] = torch.inf, torch.inf
    for groups in (1, 2):
        found = weigh(network, key.nan_to_num(posinf=3e38), value, groups)
        assert bool(found.isfinite().all())
        assert bool((found > 0).all())
        assert found.max() <= 1.001 * torch.tensor(MOST_EXPONENT).exp()
        torch.testing.assert_close(found[0, :, 1], torch.full_like(found[0, :, 1], -MOST_EXPONENT).exp())
    value[1, 0, 4, 0] = torch.nan
    found = weigh(network, key, value, 1)
    assert found.isnan().nonzero().tolist() in ([[1, 0, 4]], [[0, 0, 3], [1, 0, 4]])


def test_rows_are_weighed_as_they_are_kept() -> None:
    """Quantized: by the numbers that come back, so that held rows have the weights that they were appended with."""
    network, dims = random_network(HeadShape(2, 8, 6), rope=ROPE), (2, 2, 8, 6)
    shape = LayerShape(*dims, torch.float32, torch.device("cpu"), torch.int8, network=network)
    slots = Slots(2, shape, Bound(Policy(0.5, weights=LEARNED, value_norm=True), 9))
    key, value = rows()
    fresh = slots.quantize(key, value)
    position = slots.advance(7, None)
    position, importance, weight = slots.candidates(position, slots.weigh(*fresh, position[:, None]))
    slots.keep(*fresh, position, importance, weight, position >= 0)
    held = slots.position >= 0
    assert held.sum() == 14
    assert slots.row_weight is not None
    again = slots.weigh_held()
    assert again is not None
    torch.testing.assert_close(slots.row_weight[held], again[held], rtol=1e-5, atol=1e-6)
    exact = quantize(key, torch.int8).dequantized(torch.float32), quantize(value, torch.int8).dequantized(torch.float32)
    assert weight is not None
    torch.testing.assert_close(weight[..., -7:], weigh(network, *exact, 1))


def test_weights_decide() -> None:
    """With equal attention, the definition evicts in the order of weights."""
    network = random_network(HeadShape(1, 8, 6))
    key, value = (x[0, :1] for x in rows(1))
    bound = Bound(Policy(0.0, value_norm=True, weights=LEARNED), 1)
    found = recurrent(torch.zeros(1, 7, 8), key, value, bound, 1.0, network=network)
    weights = weigh(network, key[None].expand(2, -1, -1, -1), value[None].expand(2, -1, -1, -1), 1)[0, 0]
    assert int(found.evicted_at[0].argmax()) == int(weights.argmax())


def test_autocast_does_not_round_them() -> None:
    network, (key, value) = random_network(HeadShape(2, 8, 6)), rows()
    with torch.autocast("cpu", torch.bfloat16):
        found = weigh(network, key, value, 2)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, weigh(network, key, value, 2))


def test_copies_share_the_network() -> None:
    network = random_network(HeadShape(2, 8, 6))
    assert copy.deepcopy(network) is network
    assert network.on(torch.device("cpu")) is network


def test_slots_without_a_network_are_refused() -> None:
    shape = LayerShape(2, 2, 8, 6, torch.float32, torch.device("cpu"))
    with pytest.raises(UsageError, match="when a model is wrapped"):
        Slots(1, shape, Bound(Policy.parse(f"echo@{LEARNED}"), 9))
