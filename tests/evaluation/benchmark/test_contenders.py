"""Bounded states are full of random values; the full baselines compute what the unmodified model computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from msrnn.evaluation.benchmark.contenders import (
    Bounded,
    DynamicFull,
    Lineup,
    StaticFull,
    fill,
    load_factory,
    make_placed_cache,
    randomize,
    setup,
    use_default_attention,
)
from tests.helpers.tiny import FAMILIES, build, llama, tokens


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt-neox"])
@pytest.mark.parametrize("rows", [20, 32])
@torch.no_grad()
def test_a_placed_cache_gives_the_unmodified_models_logits(family: str, rows: int, device: str) -> None:
    model = build(FAMILIES[family](), device)
    ids = tokens(2, 20).to(device)
    expected = model(input_ids=ids).logits
    position = torch.zeros(1, dtype=torch.long, device=device)
    cache = make_placed_cache(model, rows, position)
    with use_default_attention(model):
        for t in range(20):
            places = position.expand(2, 1)
            step = model(input_ids=ids[:, t : t + 1], position_ids=places, past_key_values=cache, use_cache=True)
            torch.testing.assert_close(step.logits[:, 0], expected[:, t], atol=1e-4, rtol=1e-4)
            position += 1


def test_steps_stay_where_they_are(device: str) -> None:
    made = setup(build(llama(), device), 40)
    static, dynamic = StaticFull(made), DynamicFull(made)
    assert static.nbytes == dynamic.nbytes == 40 * 2 * 2 * 2 * 8 * 4  # layers, keys and values, KV heads, head, float32
    positions, lengths = list[int](), list[int]()

    def note(_: object, __: object, inputs: dict[str, Any]) -> None:
        if device == "cpu" or not torch.cuda.is_current_stream_capturing():
            positions.append(int(inputs["position_ids"].max()))
            lengths.append(int(inputs["past_key_values"].get_seq_length()))

    hook = made.model.register_forward_pre_hook(note, with_kwargs=True)
    for contender, rows in ((static, 16), (static, 40), (dynamic, 1), (dynamic, 40)):
        positions.clear()
        lengths.clear()
        with contender.stepping(3, rows) as step:
            for _ in range(50):
                step()
        assert set(positions) == {rows - 1}
        assert set(lengths[1:]) == {rows - 1}, "the first call makes a static cache"
    hook.remove()
    assert made.model.config._attn_implementation == "msrnn"


def test_buckets_end_with_everything() -> None:
    model = build(llama())
    assert StaticFull(setup(model, 1100)).buckets == (512, 1024, 1100)
    assert StaticFull(setup(model, 1024)).buckets == (512, 1024)
    assert StaticFull(setup(model, 100)).buckets == (100,)


def test_sliding_layers_are_left_to_the_dynamic_cache() -> None:
    model = build(FAMILIES["mistral-sliding"]())
    assert not StaticFull.possible(model)
    with DynamicFull(setup(model, 30)).stepping(2, 30) as step:
        step()
        step()


@pytest.mark.parametrize(("policy", "positions"), [("tova", "original"), ("h2o", "original"), ("echo", "compressed")])
def test_bounded_states_are_full(policy: str, positions: str) -> None:
    model = build(llama())
    contender = Bounded(model, policy, 8, positions=positions)
    state = contender.rnn.state(3)
    assert state.nbytes == 3 * contender.nbytes
    fill(state)
    assert ((state.positions(0) >= 0).sum(-1) == 8).all()
    assert state.layers[1].keys.std() > 0.5
    with contender.stepping(3, 8) as step:
        stepped: Any = step()
        assert torch.isfinite(stepped).all()
    read: Any = contender.reading(torch.zeros(2, 20, dtype=torch.long))()
    assert read.shape == (2, 1, 97)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_eight_bits_can_be_random(dtype: torch.dtype) -> None:
    states = torch.zeros(2, 3, 4, 8, dtype=dtype)
    randomize(states)
    assert torch.isfinite(states.float()).all()
    assert states.float().std() > 0.5


def test_the_lineup_starts_with_the_full_model() -> None:
    made = setup(build(llama()), 64)
    lineup = Lineup(
        "tova", [8, 16], positions=["original", "compact"], others=[lambda _, size: SimpleNamespace(label=f"p {size}")]
    )
    names = [c.label for c in lineup.contenders(made, print)]
    bounded = ["tova 8", "tova 16", "tova 8 compact", "tova 16 compact"]
    assert names == ["full", "full, dynamic", *bounded, "p 8", "p 16"]


@pytest.mark.parametrize(
    "name", ["benchmarks", "nowhere:at_all", "benchmarks.published:nothing", "msrnn.evaluation.benchmark:PROMPT"]
)
def test_what_cannot_be_imported(name: str) -> None:
    with pytest.raises(ValueError, match=f"contender '{name}'"):
        load_factory(name)
