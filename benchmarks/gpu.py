"""What the GPU benchmarks share: a model of Llama-2-7B's shape with random weights, and timing by events."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import setting

SHAPE: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


def milliseconds(work: Callable[[], Any], repeats: int = 20) -> float:
    """The median of runs timed by events, the first few left out."""
    times = []
    for i in range(repeats + 3):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(stop))
    return float(median(times))


def llama_2_7b() -> LlamaForCausalLM:
    """In bfloat16, on the GPU from the start."""
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, max_position_embeddings=4096, **SHAPE))
        model.eval()
        return model
    finally:
        torch.set_default_dtype(before)


def setting_with_gpu() -> dict[str, Any]:
    return {"gpu": torch.cuda.get_device_name(), **setting()}
