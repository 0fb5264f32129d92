"""How fast are the kernels of one layer, for a decode step and for prefill, on this GPU?

    python -m benchmarks.kernels [--batch 448] [--size 512] [--only int8]

A decode step reads all states once, so its bytes per second can be compared with the memory bandwidth. Prefill is
reported per token, since its scan is sequential. Every case is one CUDA graph; times are medians of many replays.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from msrnn.backends import resolve_backend
from msrnn.bound import Bound
from msrnn.core.rope import ORIGINAL, Repositioning, Rope, spacing
from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape, Slots
from msrnn.core.state import MultiState
from msrnn.evaluation.benchmark.contenders import fill
from msrnn.evaluation.benchmark.timing import bandwidth, capture_graph, milliseconds
from msrnn.evaluation.environment import environment
from msrnn.layer import attend
from msrnn.policy import Policy

ROWS = 192  # tokens of a chunk


class Case(NamedTuple):
    name: str
    heads: int = 32
    kv_heads: int = 32
    dim: int = 128
    policy: str = "tova"
    state_dtype: torch.dtype | None = None
    positions: str = ORIGINAL


CASES = [
    Case("one query head to a KV head"),
    Case("one query head, echo", policy="echo"),
    Case("one query head, compressed positions", positions="compressed"),
    Case("one query head, int8", state_dtype=torch.int8),
    Case("one query head, fp8", state_dtype=torch.float8_e4m3fn),
    Case("four query heads", kv_heads=8),
    Case("four query heads, compressed positions", kv_heads=8, positions="compressed"),
    Case("four query heads, int8", kv_heads=8, state_dtype=torch.int8),
    Case("head size 64, three query heads, choice per head", heads=9, kv_heads=3, dim=64, policy="h2o"),
]


def layer(case: Case, batch: int, size: int) -> tuple[Slots, Scoring]:
    """A layer whose slots are full of random states, and its scoring."""
    device = torch.device("cuda")
    shape = LayerShape(case.heads, case.kv_heads, case.dim, case.dim, torch.bfloat16, device, case.state_dtype)
    slots = Slots(batch, shape, Bound(Policy.parse(case.policy), size))
    fill(MultiState([slots], {}, columns=0))
    apart, pairs = spacing(case.positions), case.dim // 2
    frequency = 10_000.0 ** -(torch.arange(pairs, dtype=torch.float32, device=device) / pairs)
    return slots, Scoring(case.dim**-0.5, repositioning=Repositioning(apart, Rope(frequency)) if apart else None)


def work(case: Case, batch: int, size: int, tokens: int) -> tuple[Callable[[], object], int]:
    """A repeatable function that reads `tokens` tokens in one layer, and the bytes of the layer's states."""
    slots, scoring = layer(case, batch, size)
    query, key, value = (
        torch.randn(batch, heads, tokens, case.dim, dtype=torch.bfloat16, device="cuda")
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    backend = resolve_backend("triton", query.device)

    def read() -> object:
        return attend(slots, query, key, value, slots.advance(tokens, None), scoring, tokens, backend)

    return read, slots.nbytes


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--batch", type=int, default=448, help="sequences of a decode step; prefill uses an eighth of them"
    )
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--only", default="", help="only cases whose name contains this text")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; run this on a machine with a GPU")
    device = torch.device("cuda")
    memory = bandwidth(device) / 1e9
    print(f"memory bandwidth: {memory:.2f} TB/s")
    for case in CASES:
        if args.only not in case.name:
            continue
        step, nbytes = work(case, args.batch, args.size, 1)
        step_ms = milliseconds(capture_graph(step, device), device).median
        result: dict[str, Any] = {"case": case.name, "batch": args.batch, "size": args.size, "step_ms": step_ms}
        result |= {"TB/s": nbytes / step_ms / 1e9, "memory TB/s": memory}
        del step
        if case.positions == ORIGINAL:  # other positions are read by decode steps
            read, _ = work(case, max(1, args.batch // 8), args.size, ROWS)
            result["µs per row"] = 1000 * milliseconds(capture_graph(read, device), device).median / ROWS
            del read
        torch.cuda.empty_cache()
        print(
            ", ".join(
                f"{name} {value:.3g}" if isinstance(value, float) else str(value) for name, value in result.items()
            )
        )
        print(json.dumps({**result, **environment(device)}))


if __name__ == "__main__":
    main()
