"""The central identities: recurrent = chunked for every policy, and size >= length = the unmodified model."""

from __future__ import annotations

import itertools
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import msrnn
from msrnn.backends import resolve_backend
from msrnn.core.quantization import quantize
from msrnn.core.rope import SPACINGS
from msrnn.core.scores import Scoring
from msrnn.core.slots import HELD, LayerShape, Slots
from msrnn.hf.loading import Loaded
from msrnn.layer import attend
from msrnn.policy import NAMES, Policy
from msrnn.reference import recurrent
from msrnn.size import SizeLike
from tests.helpers.strategies import layers, models
from tests.helpers.tiny import FAMILIES, ROTARY, build, left_padded, llama, oracle, tokens

POLICIES = [*NAMES, "window+1", "window+4", "tova+1", "tova+4", "echo+1~45"]
TOLERANCE = 1e-4
PROSE = "\n".join(topics[name] for name in ("objects", "naming"))


def positions_in(ranges: list[tuple[int, int]]) -> set[int]:
    return {position for begin, end in ranges for position in range(begin, end)}


def run_layer(
    case: dict[str, Any], inputs: tuple[Tensor, Tensor, Tensor], scoring: Scoring, backend: str
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, H, D] and eviction times [B, G, T] of the chunked order, split and padded as the case says."""
    query, key, value = inputs
    bound, length = case["bound"], case["length"]
    real = torch.arange(length)[None] >= torch.tensor(case["padding"])[:, None]
    dims = query.shape[1], key.shape[1], key.shape[3], value.shape[3]
    shape = LayerShape(*dims, key.dtype, key.device, case["code"], network=case["network"])
    slots = Slots(2, shape, bound)
    slots.protected.copy_(torch.tensor(case["protected"]))
    times = torch.full((2, slots.position.shape[1], length), HELD, dtype=torch.int32)

    def record(position: Tensor, evicted_at: Tensor) -> None:
        for b, g, n in ((position >= 0) & (evicted_at != HELD)).nonzero().tolist():
            times[b, g, position[b, g, n]] = evicted_at[b, g, n]

    outputs = [
        attend(
            slots,
            *(x[:, :, a:b] for x in inputs),
            slots.advance(b - a, real[:, a:b]),
            scoring,
            case["chunk"],
            resolve_backend(backend, key.device),
            record,
        )
        for a, b in zip(case["edges"], case["edges"][1:], strict=False)
    ]
    held = [sorted(set(row) - {-1}) for row in slots.position.flatten(0, 1).tolist()]
    still = [
        [j for j in range(length - case["padding"][b]) if times[b, g, j] == HELD]
        for b in range(2)
        for g in range(times.shape[1])
    ]
    assert held == still
    return torch.cat(outputs, dim=1), times


@pytest.mark.parametrize("backend", ["numba", "torch"])
@settings(max_examples=50, derandomize=True)
@given(case=layers())
def test_chunked_layer_is_recurrent_layer(backend: str, case: dict[str, Any]) -> None:
    (heads, kv_heads), length = case["heads"], case["length"]
    draw = torch.Generator().manual_seed(case["seed"])
    query = torch.randn(2, heads, length, 8, generator=draw) * 2
    key, value = (torch.randn(2, kv_heads, length, 8, generator=draw) for _ in range(2))
    scoring = Scoring(
        0.5, case["softcap"], torch.randn(heads, generator=draw) if case["sinks"] else None, case["repositioning"]
    )
    output, times = run_layer(case, (query, key, value), scoring, backend)
    key, value = (quantize(x, case["code"]).dequantized(x.dtype) for x in (key, value))
    for row, start in enumerate(case["padding"]):
        inputs = query[row, :, start:], key[row, :, start:], value[row, :, start:], case["bound"]
        rest = scoring.scale, scoring.softcap, scoring.sinks, scoring.repositioning
        protected = positions_in(case["protected"][row])
        truth = recurrent(*inputs, *rest, protected=protected, network=case["network"])
        close = (truth.margin < 1e-5).any(0).nonzero()
        cut = int(close[0]) if len(close) else length - start
        assert torch.equal(truth.evicted_at.clamp(max=cut), times[row, :, : length - start].long().clamp(max=cut))
        mine = output[row, start:].transpose(0, 1)
        torch.testing.assert_close(mine[:, : cut + 1], truth.output[:, : cut + 1], atol=TOLERANCE, rtol=TOLERANCE)
        assert (output[row, :start] == 0).all(), "padding attends to nothing"


@pytest.mark.parametrize("backend", ["numba", "torch"])
@settings(max_examples=25, derandomize=True)
@given(case=layers())
def test_decoded_layer_is_recurrent_layer(backend: str, case: dict[str, Any]) -> None:
    (heads, kv_heads), length = case["heads"], case["length"]
    draw = torch.Generator().manual_seed(case["seed"])
    query = torch.randn(1, heads, length, 8, generator=draw) * 2
    key, value = (torch.randn(1, kv_heads, length, 8, generator=draw) for _ in range(2))
    scoring = Scoring(
        0.5, case["softcap"], torch.randn(heads, generator=draw) if case["sinks"] else None, case["repositioning"]
    )
    shape = LayerShape(heads, kv_heads, 8, 8, query.dtype, query.device, case["code"], network=case["network"])
    slots = Slots(1, shape, case["bound"])
    slots.protected.copy_(torch.tensor(case["protected"][:1]))
    output = [
        attend(
            slots,
            *(x[:, :, t : t + 1] for x in (query, key, value)),
            slots.advance(1, None),
            scoring,
            1,
            resolve_backend(backend, key.device),
        )
        for t in range(length)
    ]
    key, value = (quantize(x, case["code"]).dequantized(x.dtype) for x in (key, value))
    rest = scoring.scale, scoring.softcap, scoring.sinks, scoring.repositioning
    one = query[0], key[0], value[0], case["bound"]
    truth = recurrent(*one, *rest, protected=positions_in(case["protected"][0]), network=case["network"])
    close = (truth.margin < 1e-5).any(0).nonzero()
    cut = int(close[0]) if len(close) else length
    mine = torch.cat(output, dim=1)[0].transpose(0, 1)
    torch.testing.assert_close(mine[:, : cut + 1], truth.output[:, : cut + 1], atol=TOLERANCE, rtol=TOLERANCE)
    if cut == length:
        held = [sorted(set(row) - {-1}) for row in slots.position[0].tolist()]
        assert held == [[j for j, e in enumerate(times) if e == HELD] for times in truth.evicted_at.tolist()]


MORE = ("tova", "window+4", "tova+1~30")
HEADS = [
    pytest.param(policy, *heads, marks=() if heads == (6, 2) or policy in ("tova", "h2o") else pytest.mark.slow)
    for policy in POLICIES
    for heads in ((4, 4), (6, 2), (6, 1))
]


@pytest.mark.parametrize(("policy", "heads", "kv_heads"), HEADS)
def test_chunked_model_is_recurrent_model(policy: str, heads: int, kv_heads: int, device: str) -> None:
    model = build(llama(heads, kv_heads), device)
    ids, mask = left_padded(tokens(2, 52), [0, 13])
    for size, chunk, block in ((9, 7, 33), (16, 128, 128), (33, 1, 52)):
        rnn = msrnn.MultiStateRNN(model, policy, size, chunk=chunk, block=block)
        check_against_oracle(rnn, policy, size, ids, mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_recurrent_model(family: str, device: str) -> None:
    model = build(FAMILIES[family](), device)
    ids, mask = left_padded(tokens(2, 48), [0, 9])
    for policy, size in (("tova", 8), (Policy(0.5, "head", 1, 2), 20), ("window+4", 10)):
        rnn = msrnn.MultiStateRNN(model, policy, size, chunk=16, block=32)
        check_against_oracle(rnn, policy, size, ids, mask)


@pytest.mark.parametrize(
    "policy",
    ["echo", Policy(0.5, "head", 1, 2), *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)],
)
def test_each_layer_has_its_own_size(policy: str | Policy, device: str) -> None:
    """Also beside sliding layers; the bytes are the sum of the layers' bytes."""
    ids, mask = left_padded(tokens(2, 52), [0, 13])
    model = build(llama(6, 2, num_hidden_layers=4), device)
    for size in ([9, 20, 13, 8], [26, 8, 8, 10]):
        rnn = msrnn.MultiStateRNN(model, policy, size, chunk=7, block=33)
        check_against_oracle(rnn, policy, size, ids, mask)
        assert rnn.spec.sizes == size
        alone = [msrnn.MultiStateRNN(model, policy, one).state(2).nbytes // 4 for one in size]
        assert rnn.state(2).nbytes == sum(alone)
    sliding = build(FAMILIES["gemma2"](), device)
    size = [12, 9, 20, 30][: sliding.config.num_hidden_layers]
    check_against_oracle(msrnn.MultiStateRNN(sliding, policy, size, chunk=7, block=33), policy, size, ids, mask)


@pytest.mark.parametrize("positions", ["compressed:4", "compact"])
def test_each_layer_has_its_own_size_wherever_its_tokens_stand(positions: str) -> None:
    ids, mask = left_padded(tokens(2, 52), [0, 13])
    rnn = msrnn.MultiStateRNN(build(llama(6, 2)), "echo", [8, 15], chunk=7, block=33, positions=positions)
    check_against_oracle(rnn, "echo", [8, 15], ids, mask)


def test_a_layer_without_a_size_holds_every_token() -> None:
    """One bounded layer among layers that keep all, and the two extremes."""
    model, ids = build(llama(6, 2)), tokens(2, 52)
    read = {}
    for name, size in {"one": [8, None], "most": [8, 64], "none": [None, 8], "all": [64, 8]}.items():
        rnn = msrnn.MultiStateRNN(model, "tova", size)
        read[name] = rnn.read(ids, rnn.state(2))
    torch.testing.assert_close(read["one"], read["most"], atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(read["none"], read["all"], atol=TOLERANCE, rtol=TOLERANCE)
    assert not torch.allclose(read["one"], read["none"], atol=1e-2)


@pytest.mark.parametrize("family", ROTARY)
def test_family_is_recurrent_model_wherever_its_tokens_stand(family: str) -> None:
    model = build(ROTARY[family]())
    ids, mask = left_padded(tokens(2, 48, seed=2), [0, 9])
    for policy, size, positions in (("tova", 8, "compressed"), (Policy(0.5, "head", 1, 2), 9, "compact")):
        rnn = msrnn.MultiStateRNN(model, policy, size, chunk=16, block=32, positions=positions)
        check_against_oracle(rnn, policy, size, ids, mask)


@settings(max_examples=15, derandomize=True)
@given(case=models())
def test_chunked_model_is_recurrent_model_for_any_policy(case: dict[str, Any]) -> None:
    policy, size = case["policy"], case["size"]
    ids, mask = left_padded(tokens(2, case["length"], case["seed"]), case["padding"])
    options = {name: case[name] for name in ("chunk", "block", "positions")}
    rnn = msrnn.MultiStateRNN(build(case["config"]), policy, size, **options)
    check_against_oracle(rnn, policy, size, ids, mask, may_tie=True)


def check_against_oracle(
    rnn: msrnn.MultiStateRNN,
    policy: str | Policy,
    size: SizeLike,
    ids: Tensor,
    mask: Tensor,
    may_tie: bool = False,
) -> None:
    logits = rnn.read(ids, rnn.state(len(ids)), mask).cpu()
    evicted_at = msrnn.trace(rnn, ids, mask).evicted_at
    length = ids.shape[1]
    for row, start in enumerate((mask == 0).sum(-1).tolist()):
        truth = oracle(rnn.model, ids[row, start:], policy, size, rnn.spec.repositioning)
        steps = torch.where(evicted_at[row, ..., start:] == length, HELD, evicted_at[row, ..., start:] - start)
        assert truth.agrees(steps), f"row {row}: other tokens left than by the definition"
        assert (evicted_at[row, ..., :start] == -1).all()
        part = slice(start, start + truth.excused_from + 1)
        torch.testing.assert_close(
            logits[row, part], truth.logits[: truth.excused_from + 1], atol=TOLERANCE, rtol=TOLERANCE
        )
        assert may_tie or truth.excused_from > length // 4, "ties excuse so much that this example shows nothing"


@pytest.mark.parametrize("policy", [*POLICIES, "full"])
def test_a_size_beyond_the_length_is_the_unmodified_model(policy: str, device: str) -> None:
    model = build(llama(), device)
    ids, mask = left_padded(tokens(2, 40), [0, 7])
    with torch.no_grad():
        expected = model(ids.to(device), attention_mask=mask.to(device), position_ids=positions(mask).to(device)).logits
    rnn = msrnn.MultiStateRNN(model, policy, None if policy == "full" else 40, chunk=16, block=24)
    logits = rnn.read(ids, rnn.state(2), mask)
    torch.testing.assert_close(logits[mask == 1], expected[mask == 1], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ["tova", "full"])
def test_family_with_a_size_beyond_the_length(family: str, policy: str, device: str) -> None:
    model = build(FAMILIES[family](), device)
    ids = tokens(2, 40).to(device)
    expected_tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    rnn = msrnn.MultiStateRNN(model, policy, None if policy == "full" else 64, chunk=16, block=24)
    torch.testing.assert_close(rnn.read(ids, rnn.state(2)), expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert torch.equal(rnn.generate(ids, max_new_tokens=8, do_sample=False), expected_tokens)
    with torch.no_grad():
        ownerless = model(ids, use_cache=False).logits
    torch.testing.assert_close(ownerless, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("family", ROTARY)
@pytest.mark.parametrize("positions", ["compressed", "compact"])
def test_family_with_no_gaps_stands_where_it_stood(family: str, positions: str) -> None:
    model = build(ROTARY[family]())
    ids = tokens(2, 40)
    expected_tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    rnn = msrnn.MultiStateRNN(model, "tova", 64, chunk=16, block=24, positions=positions)
    torch.testing.assert_close(rnn.read(ids, rnn.state(2)), expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert torch.equal(rnn.generate(ids, max_new_tokens=8, do_sample=False), expected_tokens)


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("family", ["default", "yarn", "neighbours, partial: glm"])
def test_a_million_tokens_on_it_reads_as_at_the_start(family: str, backend: str) -> None:
    """Where the model's own angles, in float32, are 0.06 apart."""
    model, ids = build(ROTARY[family]()), tokens(2, 60)
    rnn = msrnn.MultiStateRNN(model, "tova", 12, chunk=16, backend=backend, positions="compressed")
    expected = rnn.read(ids, rnn.state(2))
    far = rnn.state(2)
    for layer in far.layers:
        layer.seen.fill_(1_000_000)
    torch.testing.assert_close(rnn.read(ids, far), expected, atol=1e-3, rtol=1e-3)
    plain = msrnn.MultiStateRNN(model, "tova", 12, chunk=16, backend=backend)
    for layer in far.layers:
        layer.reset()
        layer.seen.fill_(1_000_000)
    off = plain.read(ids, plain.convert_state(far)) - plain.read(ids, plain.state(2))
    assert off.abs().max() > 0.01, "original positions do lose precision there"


def positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


@settings(max_examples=20, derandomize=True)
@given(
    cuts=st.lists(st.integers(1, 59), max_size=5),
    chunk=st.integers(1, 70),
    block=st.integers(1, 70),
    policy=st.sampled_from(POLICIES),
    where=st.sampled_from(["original", "original", *SPACINGS]),
)
def test_the_split_never_changes_the_answer(cuts: list[int], chunk: int, block: int, policy: str, where: str) -> None:
    model = build(llama())
    ids, mask = left_padded(tokens(2, 60), [0, 11])
    whole = msrnn.MultiStateRNN(model, policy, 12, positions=where)
    expected_state = whole.state(2)
    expected = whole.read(ids, expected_state, mask)
    rnn = msrnn.MultiStateRNN(model, policy, 12, chunk=chunk, block=block, positions=where)
    state = rnn.state(2)
    edges = sorted({0, *cuts, 60})
    parts = [rnn.read(ids[:, a:b], state, mask[:, a:b]) for a, b in itertools.pairwise(edges)]
    logits = torch.cat(parts, dim=1)
    torch.testing.assert_close(logits[mask == 1], expected[mask == 1], atol=TOLERANCE, rtol=TOLERANCE)
    for layer in range(2):
        assert torch.equal(state.positions(layer).sort(-1).values, expected_state.positions(layer).sort(-1).values)


@pytest.mark.small_model
def test_the_small_model_is_recurrent(small: Loaded) -> None:
    ids = small.tokenizer(PROSE, return_tensors="pt").input_ids[:, :56]
    for policy in ("tova", "h2o"):
        rnn = msrnn.MultiStateRNN(small.model, policy, 16, chunk=20, block=40)
        check_against_oracle(rnn, policy, 16, ids, torch.ones_like(ids))


@pytest.mark.slow
@pytest.mark.small_model
def test_the_small_model_with_a_size_beyond_the_length(small: Loaded) -> None:
    model, tokenizer = small
    ids = tokenizer(PROSE, return_tensors="pt").input_ids[:, :64]
    model.set_attn_implementation("eager")
    settings: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    rnn = msrnn.MultiStateRNN(model, "tova", 96, chunk=24)
    torch.testing.assert_close(rnn.read(ids, rnn.state()), logits, atol=1e-3, rtol=TOLERANCE)
    assert torch.equal(rnn.generate(ids, **settings), expected)
