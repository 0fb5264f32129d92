from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import BloomConfig, Phi3Config

from msrnn import MultiStateCache, MultiStateRNN
from msrnn.core.rope import Repositioning
from msrnn.errors import UsageError
from msrnn.hf import inspect_layers
from msrnn.hf.inspect_layers import record_layers
from tests.helpers.tiny import FAMILIES, ROTARY, build, llama, tokens


@pytest.mark.parametrize("family", ROTARY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_moved_key_is_the_one_that_the_model_writes_there(family: str, dtype: torch.dtype) -> None:
    """At positions that were not looked at."""
    model = build(ROTARY[family]()).to(dtype)
    spec = MultiStateRNN(model, "tova", 8, positions="compressed").spec
    assert any(spec.repositioning)
    for a, b in ((0, 37), (400, 3), (5, 411)):
        here, there = ([seen.key for seen in record_layers(model, spec.model.config, 4, p) if seen] for p in (a, b))
        for key, expected, repositioning in zip(here, there, spec.repositioning, strict=True):
            if repositioning is None:
                assert torch.equal(key, expected)
                continue
            moved = repositioning.rerotate(key, torch.tensor([a]), torch.tensor([b]))
            tolerance = 1e-4 if dtype == torch.float32 else 0.04
            torch.testing.assert_close(moved, expected.float(), atol=tolerance, rtol=tolerance)


def test_each_layer_has_its_own_rotation() -> None:
    spec = MultiStateRNN(build(ROTARY["two: gemma3"]()), "tova", 8, positions="compact").spec
    sliding, _, whole = (
        repositioning.rope.frequency for repositioning in spec.repositioning if isinstance(repositioning, Repositioning)
    )
    assert not torch.equal(sliding, whole)


REFUSED = {
    "no positions at all to turn": (FAMILIES["gpt2"], "no rotary positions"),
    "biases by distance": (lambda: BloomConfig(vocab_size=97, hidden_size=48, n_layer=2, n_head=6), "cannot bound it"),
    "frequencies by length": (
        lambda: llama(rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}),
        "type dynamic, whose frequencies change",
    ),
    "frequencies that switch": (
        lambda: Phi3Config(
            **{**llama().to_dict(), "model_type": "phi3", "original_max_position_embeddings": 128},
        ),
        "type longrope, whose frequencies change",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    config, reason = REFUSED[name]
    made = config()
    if "switch" in name:
        made.rope_parameters = {
            "rope_type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 128,
        }
    model = build(made)
    for wrap in (MultiStateRNN, MultiStateCache):
        with pytest.raises(ValueError, match=reason):
            wrap(model, "tova", 8, positions="compressed")
    assert model.config._attn_implementation == "eager"


def test_a_rotation_that_is_not_known() -> None:
    """Keys that are scaled after they were rotated are not what a rotation makes of others."""
    model = build(llama())
    original = type(model.model.rotary_emb).forward

    class Stretched(type(model.model.rotary_emb)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            cos, sin = original(self, x, position_ids)
            return cos * (1 + position_ids[..., None]), sin

    model.model.rotary_emb.__class__ = Stretched
    with pytest.raises(ValueError, match="layer 0 rotates its keys in an unknown way"):
        MultiStateRNN(model, "tova", 8, positions="compressed")


def test_nothing_to_move() -> None:
    with pytest.raises(ValueError, match="policy 'full' leaves no gaps"):
        MultiStateRNN(build(llama()), "full", None, positions="compressed")
    with pytest.raises(ValueError, match="did you mean 'compact'"):
        MultiStateRNN(build(llama()), "tova", 8, positions="compct")


def test_a_cache_of_its_own() -> None:
    """Under stock `generate`, with padding: what the wrapper generates."""
    model = build(llama())
    ids, mask = tokens(2, 30), torch.ones(2, 30, dtype=torch.long)
    mask[1, :7] = 0
    settings: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    cache = MultiStateCache(model, "tova", 9, positions="compressed")
    mine = model.generate(ids, past_key_values=cache, **settings)
    assert torch.equal(mine, MultiStateRNN(model, "tova", 9, positions="compressed").generate(ids, **settings))
    assert not torch.equal(mine, MultiStateRNN(model, "tova", 9).generate(ids, **settings))
    assert cache.state.fingerprint["positions"] == "compressed:lnln"


@pytest.mark.parametrize(("noise", "fits"), [(0.05, True), (1.0, False)])
def test_rounding_is_not_taken_for_ignored_positions(noise: float, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of a large model in bfloat16 differ by some percent between runs of other shapes."""
    rnn, draw = MultiStateRNN(build(llama()), "tova", 8), torch.Generator().manual_seed(0)
    model = rnn.model

    def rounded(*words: Any, **named: Any) -> list[Any]:
        layers = record_layers(model, model.config, *words[2:], **named)
        for layer in filter(None, layers):
            layer.key.add_(noise * layer.key.std() * torch.randn(layer.key.shape, generator=draw))
        return layers

    own = record_layers(model, model.config)
    monkeypatch.setattr(inspect_layers, "record_layers", rounded)
    with nullcontext() if fits else pytest.raises(UsageError, match="ignores the position ids"):
        inspect_layers.check_takes_positions(model, model.config, own)
