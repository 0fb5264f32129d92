"""Multi-head latent attention: its rows cannot be bounded, and the option is not ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.tiny import build
from tests.helpers.vllm_engines import open_llm, serve

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'msrnn[vllm]'")

from msrnn.errors import UsageError


def test_a_model_with_latent_attention_is_refused(tmp_path: Path) -> None:
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
