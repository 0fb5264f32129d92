"""Random cases for property tests: bounds, repositionings, layers and models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from msrnn.bound import Bound
from msrnn.core.protection import RANGES
from msrnn.core.quantization import STATE_DTYPES
from msrnn.core.rope import SPACINGS, Repositioning, Rope, spacing
from msrnn.core.weights_file import HeadShape
from msrnn.policy import RANDOM, Policy
from tests.helpers.networks import random_network
from tests.helpers.tiny import FAMILIES, llama


@st.composite
def bounds(draw: st.DrawFn) -> Bound:
    size = draw(st.integers(1, 40))
    first = draw(st.integers(0, size - 1))
    spare = size - 1 - first
    recent = draw(st.integers(0, spare) | st.floats(0, spare / size))
    decay = draw(st.sampled_from([None, 0.0, 1.0]) | st.floats(0, 1))
    value = decay is not None and draw(st.booleans())
    weights = draw(st.sampled_from([None, RANDOM])) if decay is None else None
    policy = Policy(decay, draw(st.sampled_from(["layer", "head"])), first, recent, value, weights=weights)
    window = draw(st.none() | st.integers(size + 1, 60))
    return Bound(policy, size, window, sliding=draw(st.booleans()))


@st.composite
def protected_ranges(draw: st.DrawFn, bound: Bound) -> list[tuple[int, int]]:
    """RANGES ranges of positions, which leave the policy the rows that it needs."""
    left, begin, ranges = bound.size - bound.policy.first - bound.recent - 1, 0, []
    for _ in range(RANGES):
        begin += draw(st.integers(0, 12))
        end = begin + draw(st.integers(0, min(left, 8)))
        ranges.append((begin, end))
        left, begin = left - (end - begin), end
    return ranges


@st.composite
def repositioning(draw: st.DrawFn) -> Repositioning:
    """Some way of standing closer together, and some rotation of 8 dimensions."""
    apart = draw(st.sampled_from([*SPACINGS.values(), spacing("compressed:4"), spacing(lambda gap: min(gap, 3) / 2)]))
    assert apart is not None
    rotated = draw(st.integers(1, 4))
    frequency = 10.0 ** -torch.arange(rotated, dtype=torch.float32) * 0.7
    return Repositioning(apart, Rope(frequency, draw(st.sampled_from([0, 8 - 2 * rotated])), draw(st.booleans())))


@st.composite
def layers(draw: st.DrawFn) -> dict[str, Any]:
    """A layer, its inputs, and one way of splitting and padding them."""
    length = draw(st.integers(1, 40))
    cuts = draw(st.lists(st.integers(1, length), max_size=4))
    bound = draw(bounds())
    if bound.policy.value_norm and draw(st.booleans()):
        bound = replace(bound, policy=replace(bound.policy, weights="x.safetensors"))
    heads = draw(st.sampled_from([(2, 2), (6, 2), (4, 1)]))  # GQA ratios 1, 3 and all-to-one
    rope = draw(st.none() | repositioning().map(lambda one: one.rope))
    return {
        "bound": bound,
        "network": random_network(HeadShape(heads[1], 8, 8), rope=rope) if bound.policy.learned else None,
        "protected": [draw(protected_ranges(bound)) for _ in range(2)],
        "heads": heads,
        "length": length,
        "edges": sorted({0, *cuts, length}),
        "chunk": draw(st.integers(1, 48)),
        "padding": [draw(st.integers(0, length - 1)), 0],
        "softcap": draw(st.none() | st.just(3.0)),
        "sinks": draw(st.booleans()),
        "repositioning": draw(st.none() | repositioning()),
        "code": draw(st.sampled_from([None, None, *STATE_DTYPES.values()])),
        "seed": draw(st.integers(0, 10_000)),
    }


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """A model with GQA, a sliding window, soft-capping or sinks; a policy; one way of splitting and padding a text."""
    config = draw(st.sampled_from(["llama", "mistral-sliding", "gemma2", "gpt-oss"]).map(lambda name: FAMILIES[name]()))
    if config.model_type == "llama":
        heads, kv_heads = draw(st.sampled_from([(2, 2), (6, 2), (4, 1)]))
        config = llama(heads, kv_heads, hidden_size=8 * heads)
    else:
        config.sliding_window = draw(st.integers(2, 50))
    bound, length = draw(bounds()), draw(st.integers(1, 40))
    return {
        "config": config,
        "policy": replace(bound.policy, horizon=draw(st.none() | st.integers(bound.size + 1, 60))),
        "size": bound.size,
        "positions": draw(st.sampled_from(["original", "original", "compact", "compressed:4"])),
        "length": length,
        "padding": [draw(st.integers(0, length - 1)), 0],
        "chunk": draw(st.integers(1, 48)),
        "block": draw(st.integers(1, 48)),
        "seed": draw(st.integers(0, 10_000)),
    }
