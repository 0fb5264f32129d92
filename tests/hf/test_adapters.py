"""LoRA adapters are merged into a model's weights, exactly or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import msrnn
from msrnn.errors import UsageError
from msrnn.hf.adapters import check_adapter, merge_adapter
from msrnn.hf.loading import load
from tests.helpers.characters import character_model, character_tokenizer
from tests.helpers.tiny import build, llama, tokens

peft = pytest.importorskip("peft")
WEIGHTS = "adapter_model.safetensors"


def make_adapter(folder: Path, model: Any, **options: Any) -> Any:
    """An adapter of random numbers for a model, saved -> the model with it."""
    torch.manual_seed(1)
    options = {"target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    config = peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **options)
    adapted = peft.get_peft_model(model, config).eval()
    adapted.save_pretrained(folder)
    return adapted


@pytest.fixture
def base(tmp_path: Path) -> str:
    folder = tmp_path / "base"
    character_model().save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    make_adapter(tmp_path / "adapter", character_model())
    return tmp_path / "adapter"


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rslora", "dora"])
def test_a_merged_adapter_computes_what_the_adapter_does(base: str, tmp_path: Path, options: Any) -> None:
    adapted, ids = make_adapter(tmp_path / "adapter", character_model(), **options), tokens(1, 20)
    model = load(base, "cpu", lora=tmp_path / "adapter").model
    assert type(model) is type(character_model())
    rnn = msrnn.MultiStateRNN(model, "tova", 64)
    with torch.no_grad():
        expected, plain = adapted(ids).logits, character_model()(ids).logits
    torch.testing.assert_close(rnn.read(ids, rnn.state()), expected, atol=1e-4, rtol=1e-4)
    assert (expected - plain).abs().max() > 0.01


def test_states_of_the_model_without_the_adapter_are_refused(base: str, adapter: Path, tmp_path: Path) -> None:
    plain = msrnn.MultiStateRNN(load(base, "cpu").model, "tova", 8)
    state = plain.state()
    plain.read(tokens(1, 20), state)
    state.save(tmp_path / "state.safetensors")
    merged = msrnn.MultiStateRNN(load(base, "cpu", lora=adapter).model, "tova", 8)
    with pytest.raises(UsageError, match=r"other weights|another model"):
        merged.load_state(tmp_path / "state.safetensors")


def test_an_adapter_of_another_model(base: str, tmp_path: Path) -> None:
    make_adapter(tmp_path / "adapter", build(llama()))
    with pytest.raises(UsageError, match=r"lora=.*does not fit this model .*size mismatch.*an adapter made for it"):
        load(base, "cpu", lora=tmp_path / "adapter")


def test_an_adapter_of_other_layers(base: str, tmp_path: Path) -> None:
    make_adapter(tmp_path / "adapter", character_model())
    change_config(tmp_path / "adapter", target_modules=["c_attn"])
    with pytest.raises(UsageError, match="does not fit this model"):
        load(base, "cpu", lora=tmp_path / "adapter")


@pytest.mark.parametrize("kind", ["missing", "unknown"])
def test_tensors_that_are_not_those_of_the_configuration(base: str, adapter: Path, kind: str) -> None:
    """PEFT alone would warn, or say nothing, and leave a layer as it was."""
    tensors = load_file(adapter / WEIGHTS)
    name = sorted(tensors)[0]
    if kind == "missing":
        del tensors[name]
    else:
        tensors[name.replace("layers.0", "layers.7")] = tensors[name].clone()
    save_file(tensors, adapter / WEIGHTS)
    with pytest.raises(UsageError, match="its tensors are not those of its configuration"):
        load(base, "cpu", lora=adapter)


def test_numbers_that_are_not_finite(base: str, adapter: Path) -> None:
    tensors = load_file(adapter / WEIGHTS)
    tensors[sorted(tensors)[0]].fill_(float("nan"))
    save_file(tensors, adapter / WEIGHTS)
    with pytest.raises(UsageError, match=r"(?i)nan|finite|broken"):
        load(base, "cpu", lora=adapter)


def test_a_weight_that_two_layers_share(tmp_path: Path) -> None:
    model = character_model()
    model.lm_head.weight = model.model.embed_tokens.weight
    make_adapter(tmp_path / "adapter", character_model(), target_modules=["lm_head"])
    with pytest.raises(UsageError, match="changes lm_head, which shares its weight with another layer"):
        merge_adapter(model, tmp_path / "adapter")


def test_folders_that_are_no_adapters(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no such folder, or one without adapter_config\.json"):
        check_adapter(tmp_path)
    change_config(adapter, peft_type="PROMPT_TUNING")
    with pytest.raises(UsageError, match="an adapter of kind PROMPT_TUNING; only LoRA is merged"):
        check_adapter(adapter)
    for damaged in ("", "[]", "{}"):
        (adapter / "adapter_config.json").write_text(damaged)
        with pytest.raises(UsageError, match="is damaged"):
            check_adapter(adapter)


def test_before_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: Path) -> None:
    with pytest.raises(UsageError, match="no such folder, or one without"):
        load("there-is-no-such-model", "cpu", lora=tmp_path)
    with pytest.raises(UsageError, match="is not merged into weights that processes share"):
        load("there-is-no-such-model", "cpu", lora=adapter, shared=True)
    monkeypatch.setattr("msrnn.hf.adapters.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"needs the package peft; pip install 'msrnn\[lora\]'"):
        load("there-is-no-such-model", "cpu", lora=adapter)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
