"""Which backend a layer gets: vLLM's own without the option, and msrnn's with it, whatever its name is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.tiny import build
from tests.helpers.vllm_engines import draw_prompts, find_layers, make_config, open_llm, serve, write_model

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'msrnn[vllm]'")

from vllm.config import set_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec

from msrnn.errors import UsageError
from msrnn.integrations.vllm import choice, register
from msrnn.integrations.vllm.attention import BoundedAttention
from msrnn.integrations.vllm.metadata import BoundedMetadataBuilder
from msrnn.integrations.vllm.spec import BoundedSpec

OPTIONS = {"policy": "tova", "size": 512}
# Those that a GPU has by default, of which this machine can import the first.
DEFAULTS = ("TRITON_ATTN", "FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TRITON_MLA")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model("llama", tmp_path_factory.mktemp("llama"))


def specs(llm: Any) -> list[Any]:
    [found] = llm.collective_rpc("get_kv_cache_spec")
    return list(found.values())


def test_a_size_that_keeps_everything_is_vllm_alone(folder: str) -> None:
    """Models with and without the option, one after the other in one process."""
    prompts, answers = draw_prompts(12, longest=300), []
    for options in (None, OPTIONS, None):
        with open_llm(folder, options) as llm:
            answers.append([answer.tokens for answer in serve(llm, prompts, 24, positions=False).answers])
            kinds = {type(layer.impl) for layer in find_layers(llm)}
            assert kinds == {BoundedAttention if options else CPUAttentionBackendImpl}
            assert {type(spec) for spec in specs(llm)} == {BoundedSpec if options else FullAttentionSpec}
    assert answers[0] == answers[1] == answers[2]


def test_without_the_option_all_is_vllms_own(folder: str) -> None:
    backend = choice.make_choice("CPU_ATTN")
    with set_current_vllm_config(make_config(folder, None)):
        assert backend.get_impl_cls() is CPUAttentionBackendImpl
        assert backend.get_builder_cls() is CPUAttentionMetadataBuilder
        spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
        assert not hasattr(backend, "customize_spec") or backend.customize_spec(spec) is spec
        sizes = backend.get_supported_kernel_block_sizes()
        assert [vars(size) for size in sizes] == [
            vars(size) for size in CPUAttentionBackend.get_supported_kernel_block_sizes()
        ]
    assert backend.get_name() == CPUAttentionBackend.get_name()
    assert issubclass(backend, CPUAttentionBackend)


def test_every_name_of_vllm_leads_to_a_choice() -> None:
    register()
    names = [*choice.list_names()]
    assert {*DEFAULTS, "CPU_ATTN"} <= {*names}
    for name in names:
        assert AttentionBackendEnum[name].get_path() == f"msrnn.integrations.vllm.choice.{name}"
    with pytest.raises(AttributeError, match="NOTHING"):
        _ = choice.NOTHING  # type: ignore[attr-defined, unused-ignore]


def test_a_gpus_backend_is_msrnns_with_the_option(folder: str) -> None:
    """A GPU's platform chooses among those that say they are valid, and takes the name of the class."""
    register()
    backend: Any = AttentionBackendEnum.TRITON_ATTN.get_class()
    given: dict[str, Any] = {
        "head_size": 32,
        "dtype": torch.float32,
        "kv_cache_dtype": "auto",
        "block_size": None,
        "use_mla": False,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": None,
        "attn_type": "decoder",
    }
    assert backend.full_cls_name() == ("msrnn.integrations.vllm.choice", "TRITON_ATTN")
    assert backend is AttentionBackendEnum.TRITON_ATTN.get_class()
    with set_current_vllm_config(make_config(folder, None)):
        own = backend.__bases__[0]
        assert backend.get_impl_cls() is own.get_impl_cls()
        assert backend.validate_configuration(**given) == own.validate_configuration(**given)
        assert backend.supports_alibi_sqrt()
    with set_current_vllm_config(make_config(folder, OPTIONS)):
        assert backend.validate_configuration(**given) == []
        assert backend.get_impl_cls() is BoundedAttention
        assert backend.get_builder_cls() is BoundedMetadataBuilder
        assert not backend.supports_alibi_sqrt(), "or every layer would get an argument for it"


def test_a_model_with_latent_attention_is_refused(tmp_path: Path) -> None:
    """Its rows cannot be bounded, and the option is not ignored."""
    import transformers as tf

    config = tf.DeepseekV2Config(
        vocab_size=97,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        first_k_dense_replace=2,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_shared_experts=1,
        moe_intermediate_size=32,
    )
    build(config).save_pretrained(tmp_path)
    refused = pytest.raises(UsageError, match="latent rows of multi-head latent attention cannot be bounded")
    with refused, open_llm(str(tmp_path), {"policy": "tova", "size": 16}, max_model_len=256):
        pass
    with open_llm(str(tmp_path), max_model_len=256) as llm:  # without the option it is vLLM's matter
        [answer] = serve(llm, [[5, 6, 7]], 4, positions=False).answers
    assert len(answer.tokens) == 4
