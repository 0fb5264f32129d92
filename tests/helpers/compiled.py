"""Compile kernels for a GPU that need not be present; prints a line per kernel with its shared memory and its warps.

A process of its own, since `TRITON_INTERPRET` is looked at where kernels are defined.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from msrnn.backends.triton import decode, scan
from msrnn.backends.triton.prefill import prefill_triton
from msrnn.bound import Bound
from msrnn.core.quantization import STATE_DTYPES
from msrnn.core.rope import Rope
from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape, Slots
from msrnn.policy import Policy
from tests.helpers.networks import add_network

KV_HEADS = 2


class Absent:
    """The driver of a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def read_and_step(dtype: torch.dtype, dim: int, policy: str, heads: int, size: int, length: int) -> None:
    shape, bound = LayerShape(heads, KV_HEADS, dim, dim, dtype, torch.device("cpu")), Bound(Policy.parse(policy), size)
    frequency = 100.0 ** -(torch.arange(dim // 2) / (dim // 2))
    slots, scoring = Slots(1, add_network(shape, bound, Rope(frequency)), bound), Scoring(dim**-0.5)
    query, key = (torch.zeros(1, count, length, dim, dtype=dtype) for count in (heads, KV_HEADS))
    real = torch.ones(1, length, dtype=torch.bool)
    prefill_triton(slots, query, key, key, slots.advance(length, real), scoring)
    token = query[:, :, 0].view(1, KV_HEADS, -1, dim), key[:, :, 0], key[:, :, 0], slots.advance(1, real[:, :1])[:, 0]
    decode.decode_triton(slots, *token, scoring)
    if not bound.policy.learned:
        decode.decode_triton(slots, *token, scoring, sequences=torch.zeros(1, dtype=torch.int64))


def step_codes(dtype: torch.dtype, dim: int, heads: int, size: int) -> None:
    """8-bit rows, with the assembly of `grouped_codes.py` where query heads share them."""
    for state_dtype in STATE_DTYPES.values():
        shape = LayerShape(heads, KV_HEADS, dim, dim, dtype, torch.device("cpu"), state_dtype)
        slots, row = Slots(1, shape, Bound(Policy.parse("tova"), size)), torch.zeros(1, KV_HEADS, dim, dtype=dtype)
        query = torch.zeros(1, KV_HEADS, heads // KV_HEADS, dim, dtype=dtype)
        decode.decode_triton(slots, query, row, row, slots.advance(1, None)[:, 0], Scoring(dim**-0.5))


def main(capability: int, shared_memory: int, dtype: torch.dtype, dim: int, heads: int, size: int, length: int) -> None:
    run = JITFunction.run

    def compiled(kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        made = run(kernel, *args, warmup=True, **kwargs)
        print(
            json.dumps(
                {
                    "kernel": f"{kernel.__module__}.{kernel.__name__}",
                    "shared": made.metadata.shared,
                    "warps": made.metadata.num_warps,
                }
            )
        )

    JITFunction.run = compiled
    driver.set_active(Absent(capability))
    decode.PROGRAMS = 1  # one for all slots, which then are on their way while others are attended to
    scan._shared_memory = lambda device: shared_memory
    # attention from weights, and from scores; every kind of row weights
    for policy in ("echo", "tova", "window", "random", "echo@x.safetensors"):
        read_and_step(dtype, dim, policy, heads, size, length)
    step_codes(dtype, dim, heads, size)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), getattr(torch, sys.argv[3]), *map(int, sys.argv[4:]))
