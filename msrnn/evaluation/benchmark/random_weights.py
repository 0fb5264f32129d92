"""Models of known shapes with random weights: time and memory do not depend on the values of weights."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from rich.filesize import decimal
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from msrnn.errors import UsageError
from msrnn.evaluation.batch_size import query_free_memory
from msrnn.hf.loading import check_dtype, device_named

SHAPES: dict[str, dict[str, Any]] = {
    "llama-2-7b": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
    },
    "llama-3-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
    "tiny": {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    },
}


def check_shape(name: str) -> None:
    if name not in SHAPES:
        near = difflib.get_close_matches(name, SHAPES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(SHAPES)}"
        raise UsageError(f"random weights {name!r}: no such shape; {hint}")


def random_model(name: str, device: str = "auto", dtype: str | None = None) -> PreTrainedModel:
    """A model on its device; by default in bfloat16 on CUDA and in float32 elsewhere."""
    check_shape(name)
    check_dtype(dtype)
    where = device_named(device)
    if dtype in (None, "auto"):
        dtype = "bfloat16" if where.type == "cuda" else "float32"
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, str(dtype)))
    try:
        _check_fits(name, where)
        model = _build(name, where)
        model.eval()
        return model
    finally:
        torch.set_default_dtype(before)


def _build(name: str, where: torch.device) -> LlamaForCausalLM:
    with where:
        return LlamaForCausalLM(LlamaConfig(**SHAPES[name]))


def _check_fits(name: str, where: torch.device) -> None:
    """Refuse a model that does not fit: running out of CPU memory can stop the whole machine."""
    needed, unused = sum(p.nbytes for p in _build(name, torch.device("meta")).parameters()), query_free_memory(where)
    if needed > unused > 0:
        reason = f"{decimal(needed)} do not fit into the {decimal(unused)} that {where} has free"
        raise UsageError(f"random weights {name!r}: {reason}; use a smaller shape, a smaller dtype or another device")
