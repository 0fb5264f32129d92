"""What is refused before weights are loaded, with a reason that names the value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny import FAMILIES, build
from tests.helpers.vllm_engines import make_config, open_llm, write_model

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'msrnn[vllm]'")

from msrnn.errors import UsageError
from msrnn.integrations.vllm.refusals import check_config, find_refusals

OPTIONS = {"policy": "tova", "size": 16}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "speculative decoding": ({"speculative_config": NGRAM}, "speculative_config='ngram': a page cannot give back"),
    "connector": ({"kv_transfer_config": CONNECTOR}, "kv_transfer_config='ExampleConnector': KV connectors move"),
    "bfloat16": ({"dtype": "bfloat16"}, "dtype=torch.bfloat16: a CPU computes bounded states in float32; use --dtype"),
    "fp8": ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8': rows in a page have the dtype"),
    "parts of heads": (
        {"tensor_parallel_size": 4},
        "tensor_parallel_size=4: the model has 2 KV heads, and each",
    ),
    "pipeline parallel": ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2: it has not been tested; use 1"),
    "pooling": ({"runner": "pooling"}, "runner='pooling': only text generation is supported; use --runner generate"),
    "data parallel": ({"data_parallel_size": 2}, "data_parallel_size=2: it has not been tested; use 1"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("kind", REFUSED)
def test_options_of_vllm_that_a_bounded_state_cannot_have(folder: str, kind: str) -> None:
    given, reason = REFUSED[kind]
    with pytest.raises(UsageError) as refused:
        check_config(make_config(folder, OPTIONS, **given))
    assert reason in str(refused.value)
    assert check_config(make_config(folder, None, **given)) is None  # without the option they are vLLM's matter


def test_what_is_not_refused(folder: str) -> None:
    given = {"enable_prefix_caching": True, "max_num_batched_tokens": 32, "tensor_parallel_size": 2}
    config = make_config(folder, OPTIONS, **given)
    assert list(find_refusals(config)) == []
    options = check_config(config)
    assert options is not None
    assert options.bound.size == 16


def test_a_request_may_not_be_longer_than_a_block_counts(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(folder, OPTIONS)
    config.model_config.max_model_len = 2**24 + 1
    with pytest.raises(UsageError, match=r"max_model_len=16777217: must be at most 16777216"):
        check_config(config)


SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def write(folder: Path, kind: str) -> str:
    """A tiny model that is refused."""
    import transformers as tf

    if kind in FAMILIES:
        return write_model(kind, folder)
    configs = {
        "bloom": lambda: tf.BloomConfig(vocab_size=97, hidden_size=128, n_layer=2, n_head=4),
        # vLLM reads fields that this configuration has under other names.
        "lfm2": lambda: tf.Lfm2Config(
            block_dim=128,
            block_ff_dim=64,
            **SMALL,
            layer_types=["conv", "full_attention"],
            conv_dim=128,
            conv_dim_out=128,
        ),
    }
    build(configs[kind]()).save_pretrained(folder)
    return str(folder)


MODELS = {
    "mistral-sliding": "sliding_window=12: a layer of this model has it",
    "bloom": "alibi_slopes=",
    "lfm2": "layers with a state of their own beside attention are not supported (is_hybrid)",
}


@pytest.mark.parametrize("kind", MODELS)
def test_models_that_are_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UsageError) as refused, open_llm(write(tmp_path, kind), OPTIONS, max_model_len=256):
        pass
    assert MODELS[kind] in str(refused.value)
