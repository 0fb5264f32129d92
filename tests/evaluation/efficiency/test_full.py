"""The full baselines compute what the unmodified model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import FAMILIES, build, llama, tokens

from msrnn.evaluation.efficiency.contenders import setup
from msrnn.evaluation.efficiency.full import DynamicFull, StaticFull, placed_cache, unmodified


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt-neox"])
@pytest.mark.parametrize("rows", [20, 32])
@torch.no_grad()
def test_a_placed_cache_gives_the_unmodified_models_logits(family: str, rows: int, device: str) -> None:
    model = build(FAMILIES[family](), device)
    ids = tokens(2, 20).to(device)
    expected = model(input_ids=ids).logits
    position = torch.zeros(1, dtype=torch.long, device=device)
    cache = placed_cache(model, rows, position)
    with unmodified(model):
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
