from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from msrnn.errors import UsageError
from msrnn.hf import loading as models
from msrnn.hf.loading import convert_gguf, device_named, load
from msrnn.hf.rnn import MultiStateRNN
from tests.helpers.characters import character_model, character_tokenizer
from tests.helpers.tiny_gguf import tiny_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for the test, and no access to the hub."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "cache" / "msrnn" / "models"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF, but for the rest")
    return path


def write_whole(_: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").write_text("whole")


@pytest.mark.parametrize("device", ["mps", "meta", "xpu:0", "abacus"])
def test_devices_that_are_not_known_here(device: str) -> None:
    with pytest.raises(ValueError, match=f"device='{device}': must be 'auto', 'cpu' or 'cuda'"):
        device_named(device)


def test_a_gpu_beyond_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert device_named("cuda:1").index == 1
    with pytest.raises(ValueError, match="device='cuda:7': must be at most 'cuda:1'"):
        device_named("cuda:7")


def test_conversion_is_done_once(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(models, "_convert", write_whole)
    folder = convert_gguf(file, told.append)
    assert (folder / "weights").read_text() == "whole"
    assert folder.parent == cache
    assert convert_gguf(file, told.append) == folder
    assert len(told) == 1
    assert "tiny.gguf" in told[0]
    file.write_bytes(b"another file of the same name")
    assert convert_gguf(file, told.append) != folder
    assert len(told) == 2


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
def test_interrupted_conversion_leaves_nothing(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, failure: type[BaseException]
) -> None:
    def interrupted(source: Path, folder: Path) -> None:
        write_whole(source, folder)
        raise failure

    monkeypatch.setattr(models, "_convert", interrupted)
    with pytest.raises(failure):
        convert_gguf(file)
    assert list(cache.iterdir()) == []


def test_who_converts_first_wins(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overtaken(source: Path, folder: Path) -> None:
        write_whole(source, folder)
        rival = cache / folder.parent.name[1:].rpartition(".")[0]
        rival.mkdir()
        (rival / "weights").write_text("the rival's")

    monkeypatch.setattr(models, "_convert", overtaken)
    folder = convert_gguf(file)
    assert (folder / "weights").read_text() == "the rival's"
    assert list(cache.iterdir()) == [folder]


def test_what_is_no_gguf(file: Path, cache: Path) -> None:
    pytest.importorskip("gguf")
    with pytest.raises(ValueError, match="not a GGUF file") as error:
        load(str(file), "cpu")
    assert "\n" not in str(error.value)
    assert list(cache.iterdir()) == []


def without(*missing: str) -> object:
    found = importlib.util.find_spec
    return lambda name, *rest: None if name in missing else found(name, *rest)


def test_missing_extra_names_the_mend(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("gguf", "accelerate"):
        monkeypatch.setattr(importlib.util, "find_spec", without(package))
        with pytest.raises(ValueError, match=r"pip install 'msrnn\[gguf\]'"):
            convert_gguf(file)


@pytest.mark.parametrize("name", ["/none/such", "none.gguf", "./none", "a/b/c", "no-such/model", __file__])
def test_missing_model_is_one_line(name: str) -> None:
    with pytest.raises(ValueError, match=r"give a folder, a \.gguf file, or a name on the hub") as error:
        load(name, "cpu")
    assert repr(name) in str(error.value)
    assert "\n" not in str(error.value)


def test_device_and_dtype_are_checked() -> None:
    with pytest.raises(ValueError, match="device='abacus'"):
        load("none", "abacus")
    with pytest.raises(ValueError, match="dtype='int3'"):
        load("none", "cpu", "int3")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA device"):
            load("none", "cuda")


def test_a_gguf_file_becomes_the_model_it_was(tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    original = tiny_gguf(tmp_path / "real.gguf")
    model, tokenizer = load(str(tmp_path / "real.gguf"), "cpu")
    assert capfd.readouterr() == ("", "")
    assert [path.name.startswith("real-") for path in cache.iterdir()] == [True]
    ids = torch.tensor([tokenizer("badcafe", add_special_tokens=False)["input_ids"]])
    assert ids.tolist() == [[4, 3, 6, 5, 3, 8, 7]]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, original(ids).logits, atol=1e-5, rtol=1e-5)
    again = load(str(tmp_path / "real.gguf"), "cpu", "bfloat16").model
    assert again.dtype == torch.bfloat16


def test_a_gguf_file_that_lacks_weights_is_refused(tmp_path: Path, cache: Path) -> None:
    tiny_gguf(tmp_path / "real.gguf", lacking="model.layers.1.mlp.up_proj.weight")
    reason = r"1 of the model's weights are missing, the first is model\.layers\.1\.mlp\.up_proj\.weight"
    with pytest.raises(ValueError, match=reason):
        load(str(tmp_path / "real.gguf"), "cpu")
    assert list(cache.iterdir()) == []


def saved(tmp_path: Path, **changed: float) -> Path:
    """A folder with a model of which these weights begin with another number; without a tokenizer."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=1
    )
    model = LlamaForCausalLM(config)
    for name, value in changed.items():
        model.get_parameter(name.replace("__", ".")).data.view(-1)[0] = value
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_without_a_tokenizer_is_told_in_a_whole_sentence(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    with pytest.raises(ValueError, match="the folder has no tokenizer; save it there as well, with") as error:
        load(str(folder), "cpu")
    assert str(error.value).endswith(f"save_pretrained({str(folder)!r})")
    assert "\n" not in str(error.value)


def test_a_tokenizer_that_cannot_be_loaded(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="its tokenizer cannot be loaded") as error:
        load(str(folder), "cpu")
    assert "\n" not in str(error.value)
    assert not str(error.value).rstrip(")").endswith(":")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model__layers__0__self_attn__k_proj__weight", "lm_head__weight"])
def test_weights_that_are_not_finite_are_named(name: str, value: float, tmp_path: Path) -> None:
    folder = saved(tmp_path, **{name: value})
    character_tokenizer().save_pretrained(folder)
    told = f"1 of its 21 weights have NaN or infinite numbers, {name.replace('__', '.')} first"
    with pytest.raises(ValueError, match=told):
        load(str(folder), "cpu")


def test_a_wrapped_model_whose_weights_are_not_finite(tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(saved(tmp_path, model__layers__0__self_attn__k_proj__weight=float("nan")))
    with pytest.raises(ValueError, match=r"NaN or infinite numbers, model\.layers\.0\.self_attn\.k_proj\.weight"):
        MultiStateRNN(model, "tova", 8)


def test_a_folder_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    original = tiny_gguf(tmp_path / "real.gguf")
    weights = original.state_dict()
    del weights["lm_head.weight"]
    original.save_pretrained(tmp_path / "model", state_dict=weights)
    with pytest.raises(ValueError, match="1 of the model's weights are missing"):
        load(str(tmp_path / "model"), "cpu")


DAMAGED: dict[str, tuple[str, Any, str]] = {
    "null": ("config.json", "null", "cannot be loaded"),
    "type": ("config.json", {"hidden_size": "many"}, r"Field 'hidden_size' expected int, got str \(value: 'many'\)"),
    "activation": ("config.json", {"hidden_act": "nope"}, "unknown value 'nope'"),
    "shapes": ("config.json", {"hidden_size": 64}, "the shapes of its weights are not those in its config.json"),
    "nested": ("config.json", "[" * 100_000, "cannot be loaded"),
    "generation": ("generation_config.json", "[]", "cannot be loaded"),
    "tokenizer": ("tokenizer_config.json", "[]", "its tokenizer cannot be loaded"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_checkpoints_are_bad_input(name: str, tmp_path: Path) -> None:
    """Whatever transformers raises for them."""
    file, change, reason = DAMAGED[name]
    character_model().save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / file
    changed = change if isinstance(change, str) else json.dumps({**json.loads(path.read_text()), **change})
    path.write_text(changed)
    with pytest.raises(UsageError, match=reason):
        load(str(tmp_path), "cpu")


@pytest.mark.parametrize("name", [None, ".", "~"])
def test_a_revision_of_what_has_none(name: str | None) -> None:
    with pytest.raises(UsageError, match="revision='v1': only models on the hub have one; leave it out"):
        load(name, revision="v1")


def test_a_revision_of_a_model_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its weights and of its tokenizer."""
    asked: list[tuple[str, str | None, bool]] = []

    def from_pretrained(name: str, **options: Any) -> Any:
        asked.append((name, options.get("revision"), options["trust_remote_code"]))
        if "output_loading_info" not in options:
            return character_tokenizer()
        return character_model(), {"missing_keys": []}

    for kind in ("AutoModelForCausalLM", "AutoTokenizer"):
        monkeypatch.setattr(f"msrnn.hf.loading.{kind}.from_pretrained", from_pretrained)
    load("an-org/a-model", revision="v1", trust_remote_code=True)
    load("an-org/a-model")
    assert asked == [("an-org/a-model", "v1", True)] * 2 + [("an-org/a-model", None, False)] * 2


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own-family"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_the_code_of_a_model_runs_only_if_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "own"
    character_model().save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own-family", "architectures": ["OwnModel"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(OWN_CODE)
    with pytest.raises(UsageError, match="needs its own code, which can do anything; read it, and give trust_remote_"):
        load(str(folder), "cpu")
    assert not (tmp_path / "modules").exists()
    assert type(load(str(folder), "cpu", trust_remote_code=True).model).__name__ == "OwnModel"
