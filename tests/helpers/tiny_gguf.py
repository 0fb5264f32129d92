"""A tiny model as a GGUF file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_gguf(path: Path, lacking: str | None = None) -> LlamaForCausalLM:
    """A GGUF file in float32, and the model that it must become."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    tokens = ["<unk>", "<s>", "</s>", *"abcdefghijklm", "kl"]
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=1,  # GGUF permutes the rows of more heads
        num_key_value_heads=1,
        rms_norm_eps=1e-5,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in [
        (writer.add_context_length, 128),
        (writer.add_embedding_length, 32),
        (writer.add_block_count, 2),
        (writer.add_feed_forward_length, 48),
        (writer.add_head_count, 1),
        (writer.add_head_count_kv, 1),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_rope_freq_base, 10000.0),
        (writer.add_vocab_size, len(tokens)),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_token_list, tokens),
        (writer.add_token_types, [3] * 3 + [1] * 14),
        (writer.add_token_merges, ["k l"]),
        (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 2),
        (writer.add_unk_token_id, 0),
    ]:
        add(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, weight in model.state_dict().items():
        stored = weight.numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # GGUF keeps the halves of a rotation side by side
            stored = np.ascontiguousarray(stored.reshape(2, 16, 32).swapaxes(0, 1).reshape(32, 32))
        if name != lacking:
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
