"""A small configuration of every model family of transformers: a few thousand weights each."""

from __future__ import annotations

from typing import Any

import transformers as tf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

WINDOW = 5
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "d_model": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rotary_dim": 4,
    "max_position_embeddings": 64,
    "sliding_window": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "causal": True,
    # Decoders that were part of an encoder-decoder.
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    # Mixtures of experts.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    # Latent attention.
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    # Linear attention.
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 4,
    "state_size": 4,
    # Images.
    "depth": 1,
    "num_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "image_token_id": 90,
    "image_token_index": 90,
    "video_token_id": 91,
}
# Configurations with vision towers whose text models are families of their own: the common ones.
WITH_IMAGES = (
    *("aya_vision", "chameleon", "gemma3", "glm4v", "idefics3", "internvl", "llava", "llava_next", "llava_onevision"),
    *("mistral3", "paligemma", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm"),
)
NAMES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *WITH_IMAGES})
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}}
_INDEXED = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
_PER_LAYER = {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        "global_config": {"hidden_size": 64, "num_attention_heads": 8},
        "decoder_config": {"hidden_size_global": 64},
    },
    "chameleon": {
        "vocabulary_map": {"<image>": 90, "IMGIMGA": 91},
        "vq_config": {"base_channels": 32, "channel_multiplier": [1], "num_embeddings": 8, "latent_channels": 8},
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "cpmant": {"dim_ff": 32, "dim_head": 8},
    "ctrl": {"dff": 32},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        **_PER_LAYER,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 4,
    },
    "gemma4": {"text_config": _PER_LAYER},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "gemma4_text": _PER_LAYER,
    "glm4v": {"vision_config": {"out_hidden_size": 32}, "text_config": _MROPE},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"mlp_layer_types": ["dense", "sparse"], "linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {
        "num_layers": 1,
        "ffn_hidden_size": 32,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "mllama": {"text_config": {"cross_attention_layers": [1]}},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 4, "n_groups": 1},
    "qwen2_5_vl": {"text_config": _MROPE},
    "qwen2_vl": {"vision_config": {"embed_dim": 32}, "text_config": _MROPE},
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "local"],
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 16],
    },
    "roc_bert": {"shape_vocab_size": 97, "pronunciation_vocab_size": 97},
    "xlstm": {"hidden_size": 64, "qk_dim_factor": 1.0},
    "xlnet": {"d_head": 8, "d_inner": 32},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "zamba": {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid"] * 2},
    "zamba2": {"num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}
# What a configuration cannot be made without, where its own defaults do not fit each other.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    }
}


def small_config(name: str) -> tf.PreTrainedConfig:
    config = _small(CONFIG_MAPPING[name], OVERRIDES.get(name, {}))
    return config.decoder if name.startswith("musicgen") else config


def _small(kind: Any, overrides: dict[str, Any]) -> tf.PreTrainedConfig:
    """The defaults of a kind of configuration, with small numbers for what it has, and so its parts."""
    defaults = kind(**DEFAULTS.get(kind.model_type, {}))
    parts = {name: getattr(defaults, name) for name in getattr(kind, "sub_configs", {})}
    chosen = {name: value for name, value in SMALL.items() if name in defaults.to_dict() or name in kind.attribute_map}
    if "qk_rope_head_dim" in chosen:  # latent attention: every head has its keys, of which a part is rotated
        chosen |= {"num_key_value_heads": SMALL["num_attention_heads"], "head_dim": SMALL["qk_rope_head_dim"]}
    for name, part in parts.items():
        if part is not None:
            chosen[name] = _small(type(part), overrides.get(name, {}))
    kinds = list(dict.fromkeys(getattr(defaults, "layer_types", None) or []))
    if len(kinds) > 1 and not isinstance(getattr(kind, "layer_types", None), property):  # one layer of each kind
        chosen |= {"num_hidden_layers": len(kinds), "layer_types": kinds}
    return kind(**{**chosen, **{name: value for name, value in overrides.items() if name not in parts}})
