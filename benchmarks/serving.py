"""What does the engine gain over other ways to serve many requests at once, and how long do its clients wait?

    python -m benchmarks.serving engine --random-weights llama-2-7b --slots 448
    python -m benchmarks.serving latency --random-weights llama-2-7b --slots 448 --loads 0.5 0.9
    python -m benchmarks.serving 'paged|sdpa' 'paged|flash_varlen' --random-weights llama-2-7b

engine   requests arrive so that all batch slots stay in use; and the decode step alone
latency  long prompts among short ones: with all slots in use, and arriving at random at a lower rate
paged|…  continuous batching of transformers with this attention function, on the same requests
static   the full model with a StaticCache in a CUDA graph; all sequences begin and end together
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import random
import time
from collections.abc import Callable
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor

import msrnn
from msrnn.engine.local_executor import LocalExecutor
from msrnn.engine.requests import Request
from msrnn.evaluation.benchmark.contenders import StaticFull, setup
from msrnn.evaluation.benchmark.measurement import steps_in_buckets
from msrnn.evaluation.benchmark.random_weights import random_model
from msrnn.evaluation.benchmark.timing import milliseconds
from msrnn.evaluation.environment import environment
from msrnn.hf.loading import load

LONG, SHARE_OF_LONG = 2048, 0.2  # tokens of long prompts, among others, for `latency`


class Client:
    """Gives an engine its requests, and notes when tokens come."""

    def __init__(self, engine: msrnn.Engine, prompt: int, answer: int) -> None:
        self.engine, self.prompt, self.answer = engine, prompt, answer
        self.draw = random.Random(0)
        self.arrived: dict[Request, float] = {}
        self.last: dict[Request, float] = {}
        self.first_token: list[float] = []  # seconds from arrival
        self.between: list[float] = []
        self.tokens = self.finished = 0
        self.began = 0.0  # requests that arrived before have waited for others that all came at once

    def add(self, prompt: int | None = None, answer: int | None = None) -> None:
        params = msrnn.SamplingParams(temperature=0, max_tokens=answer or self.answer, ignore_eos=True)
        self.submit(prompt or self.prompt, params)

    def submit(self, prompt: int, params: msrnn.SamplingParams) -> None:
        ids = [self.draw.randrange(self.engine.executor.facts.vocabulary) for _ in range(prompt)]
        request = self.engine.request(ids, params)
        self.arrived[request] = time.perf_counter()
        self.engine.add(request)

    def step(self) -> None:
        events = self.engine.step()
        now = time.perf_counter()
        for event in events:
            if event.token is not None:
                self.tokens += 1
                if event.request in self.last:
                    self.between.append(now - self.last[event.request])
                elif self.arrived[event.request] >= self.began:
                    self.first_token.append(now - self.arrived[event.request])
                self.last[event.request] = now
            if event.finish_reason:
                self.finished += 1
                del self.arrived[event.request]
                self.last.pop(event.request, None)

    def fill(self, share: float = 1.0) -> None:
        """Rows in use, with answers at any point between their beginning and their end."""
        for _ in range(int(share * self.engine.executor.facts.slots)):
            self.add(answer=self.draw.randint(1, self.answer))
        while self.engine.counts.waiting:
            self.step()

    def run(self, seconds: float, arrive: Callable[[float], None]) -> dict[str, float]:
        """Rates and waiting times over some seconds; `arrive(now)` adds requests."""
        self.first_token.clear()
        self.between.clear()
        self.tokens = self.finished = steps = 0
        began = now = self.began = time.perf_counter()
        while now - began < seconds:
            arrive(now - began)
            if self.engine.idle:
                time.sleep(0.001)
            else:
                self.step()
                steps += 1
            now = time.perf_counter()
        took = now - began
        rates = {"tokens_per_second": self.tokens / took, "requests_per_second": self.finished / took}
        return {
            **rates,
            "ms_per_step": 1000 * took / max(1, steps),
            "slots": self.engine.counts.running,
            **self.waits(),
        }

    def waits(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, seconds in (("first_token", self.first_token), ("between_tokens", self.between)):
            if len(seconds) > 1:
                cuts = quantiles(seconds, n=100)
                found |= {f"{name}_ms_p50": 1000 * cuts[49], f"{name}_ms_p99": 1000 * cuts[98]}
        return found

    def saturated(self, _: float) -> None:
        while self.engine.counts.waiting < 2:
            self.add()

    def mixed(self) -> None:
        self.add(prompt=LONG if self.draw.random() < SHARE_OF_LONG else None)

    def saturated_and_mixed(self, _: float) -> None:
        while self.engine.counts.waiting < 2:
            self.mixed()

    def poisson(self, rate: float) -> Callable[[float], None]:
        due = self.draw.expovariate(rate)

        def arrive(now: float) -> None:
            nonlocal due
            while due <= now:
                self.mixed()
                due += self.draw.expovariate(rate)

        return arrive


def make_engine(model: Any, args: argparse.Namespace) -> msrnn.Engine:
    rnn = msrnn.MultiStateRNN(model, args.policy, args.size, compile=args.compile)
    options: Any = {"prefix_bytes": 0, "prefix_host_bytes": 0} if args.no_prefix_cache else {}
    engine = msrnn.Engine(rnn, args.slots, prompt_tokens=args.prompt_tokens, **options)
    began = time.perf_counter()
    engine.warm_up()
    print(f"warmed up in {time.perf_counter() - began:.1f} s", flush=True)
    return engine


def steady(engine: msrnn.Engine, client: Client, args: argparse.Namespace) -> list[dict[str, Any]]:
    began = time.perf_counter()
    client.fill()
    filled = time.perf_counter() - began
    found = client.run(args.seconds, client.saturated)
    executor = engine.executor
    assert isinstance(executor, LocalExecutor)
    slots = executor.facts.slots
    step = milliseconds(lambda: executor.batch.step(slots), executor.rnn.device).median
    alone = 1000 * slots / step
    share = found["tokens_per_second"] / alone
    return [{"case": "engine", **found, "step_alone_ms": step, "of_step_alone": share, "filled_s": filled}]


def latencies(_: msrnn.Engine, client: Client, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each load for half of the time before it is measured, so that its own requests are in the slots."""
    client.fill()
    client.run(args.seconds / 2, client.saturated_and_mixed)
    full = client.run(args.seconds, client.saturated_and_mixed)
    found: list[dict[str, Any]] = [{"case": "all slots in use", **full}]
    for share in args.loads:
        for request in [*client.arrived]:
            request.cancel()
        rate = share * full["requests_per_second"]
        client.run(args.seconds / 2, client.poisson(rate))
        measured = client.run(args.seconds, client.poisson(rate))
        found.append({"case": f"{share:g} of these requests", "rate": rate, **measured})
    return found


def static(model: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """With one cache for the longest sequence, and with a cache that grows by buckets, whose copying is not counted."""
    length, batch = args.prompt + args.answer, args.static_batch
    full = StaticFull(setup(model, length), compile=args.compile)
    times = []
    for bucket in full.buckets:
        with full.stepping(batch, bucket) as step:
            times.append(milliseconds(step, model.device).median)
        gc.collect()
        torch.cuda.empty_cache()
    steps = steps_in_buckets(full.buckets, args.prompt, length)
    growing = sum(count * ms for count, ms in zip(steps, times, strict=True)) / sum(steps)
    names = {"static": times[-1], "static, growing": growing}
    return [{"case": name, "tokens_per_second": 1000 * batch / ms, "ms_per_step": ms} for name, ms in names.items()]


def flash_varlen(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Paged attention with torch's own variable-length kernel: keys are gathered, but there is no dense mask."""
    from torch.nn.attention.varlen import varlen_attn

    cache, lengths, longest = kwargs["cache"], kwargs["cu_seq_lens_k"], kwargs["max_seqlen_k"]
    if isinstance(lengths, dict):
        lengths, longest = lengths["full_attention"], longest["full_attention"]
    known = inspect.signature(varlen_attn).parameters
    causal: Any = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    indices = {name: kwargs[name] for name in ("read_index", "write_index")}
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, **indices)
    out: Any = varlen_attn(
        query.transpose(1, 2).squeeze(0).contiguous(),
        key.contiguous(),
        value.contiguous(),
        kwargs["cu_seq_lens_q"].to(torch.int32),
        lengths.to(torch.int32),
        kwargs["max_seqlen_q"],
        longest,
        **causal,
    )
    return out[None], None


def transformers_batching(model: Any, attention: str, args: argparse.Namespace) -> dict[str, Any]:
    """The best throughput of any tenth of the time.

    Requests are at any point between their beginning and their end, as those of the engine: what they have generated
    so far is part of their prompts, which are read first.
    """
    from transformers import AttentionInterface, ContinuousBatchingConfig, GenerationConfig

    AttentionInterface.register("paged|flash_varlen", flash_varlen)
    before = model.config._attn_implementation
    if attention == "paged|flash_varlen":
        model.config._attn_implementation = attention  # the setter would look for a package of this name
    else:
        model.set_attn_implementation(attention)
    draw = random.Random(0)
    done = [draw.randrange(args.answer) for _ in range(args.slots)]
    prompts = [[draw.randrange(model.config.vocab_size) for _ in range(args.prompt + count)] for count in done]
    batching = model.continuous_batching_context_manager(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(allow_block_sharing=False),
        block=False,
        warmup=True,
    )
    counts, most, arrived = [(0.0, 0)], 0, False
    with batching as manager:
        for prompt, count in zip(prompts, done, strict=True):
            manager.add_request(prompt, max_new_tokens=args.answer - count)
        began = now = time.perf_counter()
        while now - began < args.seconds and manager.is_running():
            time.sleep(0.25)
            scheduler = manager.batch_processor.scheduler
            active = [*scheduler.active_requests.values()]
            states = [*active, *scheduler.waiting_requests.values()]
            now = time.perf_counter()
            arrived = arrived or len(states) == args.slots
            if not arrived:
                continue
            left = sum(len(state.initial_tokens) + len(state.generated_tokens) - args.prompt for state in states)
            finished = (args.slots - len(states)) * args.answer  # those that have left
            counts.append((now - began, left + finished - sum(done)))
            most = max(most, len(active))
        manager.stop(hard_stop=True)
    model.config._attn_implementation = before
    rates = tenths(counts, args.seconds)
    facts = {"most_requests_at_once": most, "tenths": [round(rate) for rate in rates]}
    return {"case": attention, "tokens_per_second": max(rates), **facts}


def tenths(counts: list[tuple[float, int]], seconds: float) -> list[float]:
    """Tokens per second in each tenth of the time, from tokens counted at some moments."""
    found, before = [], 0
    for tenth in range(1, 11):
        done = max((count for moment, count in counts if moment <= tenth * seconds / 10), default=0)
        found.append((done - before) / (seconds / 10))
        before = done
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", help="engine, latency, static, or an attention function of transformers")
    parser.add_argument("--random-weights", help="a shape such as llama-2-7b, instead of the small default model")
    parser.add_argument("--policy", default="tova")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--slots", type=int, default=8, help="answers at once; for transformers, requests")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--answer", type=int, default=3840)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--prompt-tokens", type=int, help="of prompts, between two steps; as the engine's by default")
    parser.add_argument(
        "--loads", type=float, nargs="+", default=[0.5], help="shares of the requests that all slots can take"
    )
    parser.add_argument("--static-batch", type=int, default=8)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--no-prefix-cache", action="store_true")
    args = parser.parse_args()
    model: Any = random_model(args.random_weights) if args.random_weights else load().model
    for case in args.cases:
        if case in ("engine", "latency"):
            engine = make_engine(model, args)
            found = (steady if case == "engine" else latencies)(engine, Client(engine, args.prompt, args.answer), args)
            del engine
        elif case == "static":
            found = static(model, args)
        else:
            found = [transformers_batching(model, case, args)]
        settings = {name: getattr(args, name) for name in ("policy", "size", "prompt", "answer", "prompt_tokens")}
        for row in found:
            print(json.dumps({**row, **settings, **environment(model.device)}), flush=True)


if __name__ == "__main__":
    main()
