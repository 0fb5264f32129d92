"""Time a decode step of kvpress's TOVA, evicting at every decoded token, against the unmodified model.

Both are measured in one process, in float32 on the CPU, with SDPA attention: the unmodified Hugging Face model with a
`DynamicCache` that holds `--context` tokens, and the same model that read the same context under kvpress, bounded to
`--size` KV rows per layer. Rounds of the two alternate, so that noise of the machine affects both.

kvpress does not work with the newest transformers, so this script needs its own environment:

    python -m venv DIR
    DIR/bin/pip install torch==2.13.0 kvpress==0.5.5 transformers==5.2.0
    DIR/bin/python benchmarks/peers/kvpress_decode.py --model FOLDER --tokens IDS.npy --context 3072 --size 512

The last line of stdout is one JSON object; its times are medians, in milliseconds. The line before it has the means.
"""

import argparse
import json
import time
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median

import numpy as np
import torch
from kvpress import DecodingPress, PrefillDecodingPress, TOVAPress
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

ROUND = 10


def tova_press(context: int, size: int) -> PrefillDecodingPress:
    """TOVA that keeps `size` states of the context and evicts after every decoded token."""
    # kvpress keeps int(context * (1 - ratio)) states: the half keeps rounding errors from losing one of them.
    ratio = 1 - (size + 0.5) / context
    return PrefillDecodingPress(
        prefilling_press=TOVAPress(compression_ratio=ratio),
        decoding_press=DecodingPress(base_press=TOVAPress(), compression_interval=1, target_size=size),
    )


def read_context(model: PreTrainedModel, ids: torch.Tensor, hooks: AbstractContextManager[object]) -> DynamicCache:
    """Read `ids` in one pass and return the cache, as the press behind `hooks` (if any) leaves it."""
    cache = DynamicCache(config=model.config)
    with hooks:
        model(ids[None], past_key_values=cache, logits_to_keep=1)
    return cache


def decode(
    model: PreTrainedModel, cache: DynamicCache, ids: torch.Tensor, start: int, hooks: AbstractContextManager[object]
) -> list[float]:
    """Feed `ids` one by one from position `start` on; return the milliseconds of each step but the first."""
    times = []
    with hooks:
        for position, token in enumerate(ids, start):
            began = time.perf_counter()
            # An evicted cache no longer tells the position of the next token, so it is given, as kvpress itself does.
            model(token.view(1, 1), past_key_values=cache, position_ids=torch.tensor([[position]]))
            times.append(1000 * (time.perf_counter() - began))
    return times[1:]  # the first step is slower, since the other cache was used before


def measure(
    model: PreTrainedModel, ids: torch.Tensor, context: int, size: int, steps: int
) -> tuple[list[float], list[float], int]:
    """Return the step times of the unmodified model and of the bounded one, and the most states a layer holds."""
    press = tova_press(context, size)
    full = read_context(model, ids[:context], nullcontext())
    bounded = read_context(model, ids[:context], press(model))
    full_times: list[float] = []
    bounded_times: list[float] = []
    start = context
    while len(full_times) < steps:
        count = min(ROUND, steps - len(full_times)) + 1
        fed = ids[start : start + count]
        full.crop(context)  # every round of the unmodified model starts from the same context
        full_times += decode(model, full, fed, context, nullcontext())
        bounded_times += decode(model, bounded, fed, start, press(model))
        start += count
    return full_times, bounded_times, max(bounded.get_seq_length(i) for i in range(len(bounded.layers)))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="local folder in Hugging Face format")
    parser.add_argument("--tokens", type=Path, required=True, help=".npy file with a 1-D array of token ids")
    parser.add_argument("--context", type=int, default=3072, help="tokens read before decoding")
    parser.add_argument("--size", type=int, default=512, help="KV rows per layer that kvpress may keep")
    parser.add_argument("--steps", type=int, default=50, help=f"timed steps of each, in rounds of {ROUND}")
    args = parser.parse_args()
    if not 0 < args.size < args.context:
        parser.error("--size must be positive and less than --context")
    if args.steps < 1:
        parser.error("--steps must be positive")
    return args


def main() -> None:
    args = parse_args()
    needed = args.context + args.steps + -(-args.steps // ROUND)
    ids = torch.from_numpy(np.load(args.tokens, mmap_mode="r")[:needed].astype(np.int64))
    if len(ids) < needed:
        raise SystemExit(f"{args.tokens} holds {len(ids)} tokens, {needed} are needed")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.inference_mode():
        full, bounded, held = measure(model, ids, args.context, args.size, args.steps)
    print(f"means: unmodified {mean(full):.2f} ms, bounded {mean(bounded):.2f} ms, {torch.get_num_threads()} threads")
    result = {
        "peer": "kvpress",
        "version": version("kvpress"),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "context": args.context,
        "size": args.size,
        "unmodified_ms": round(median(full), 3),
        "bounded_ms": round(median(bounded), 3),
        "ratio": round(median(bounded) / median(full), 4),
        "states_held": held,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
