"""Blocks in flight together: the same states and logits, bit for bit, as one block after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import msrnn
from msrnn.errors import UsageError
from msrnn.hf import wavefront
from msrnn.hf.wavefront import Wave, changes_rope, fitting_tokens, in_flight_together, wave_of
from tests.helpers.tiny import FAMILIES, build, left_padded, llama, tokens


def test_widths_cover_the_text_with_few_shapes() -> None:
    wave = Wave(16, 8, 16, 16)
    assert list(wave.widths(16 * 8 * 2 + 16 * 5 + 3)) == [128, 128, 64, 16, 3]
    assert list(wave.widths(15)) == [15]
    for columns in range(1, 400):
        assert sum(wave.widths(columns)) == columns
    assert {width for columns in range(1, 4000) for width in wave.widths(columns) if width >= 16} == {16, 32, 64, 128}


@pytest.mark.parametrize("batch", [1, 2, 3, 8, 31, 32, 448, 20_000])
@pytest.mark.parametrize("fitting", [0, 1000, 5000, 10**9])
def test_tokens_in_flight_are_bounded(batch: int, fitting: int) -> None:
    wave = wave_of(batch, None, 512, 64, fitting)
    assert wave.blocks & (wave.blocks - 1) == 0
    assert wave.block * batch <= max(wavefront.IN_FLIGHT, batch)
    assert wave.blocks == 1 or wave.block * wave.blocks * batch <= min(wavefront.IN_FLIGHT, fitting)


def test_a_short_text_is_one_block() -> None:
    wave = wave_of(8, None, 512, 64, 10**9)
    assert [list(wave.widths(columns)) for columns in (100, 500, 128, 700)] == [[100], [500], [128], [512, 188]]


def test_blocks_of_common_batches() -> None:
    def wave(batch: int, block: int | None = None, largest: int = 512, blocks: int = 64) -> Wave:
        return wave_of(batch, block, largest, blocks, 10**9)

    assert [wave(1), wave(8), wave(448)] == [(512, 32, 512, 128), (64, 32, 512, 64), (36, 1, 36, 36)]
    assert [wave(8, block=100), wave(1, largest=64, blocks=8)] == [(100, 16, 100, 100), (64, 8, 64, 128)]
    assert wave(8, blocks=1) == (512, 1, 512, 512)


@pytest.mark.parametrize(
    ("batch", "block", "expected"),
    [
        (1, None, {512: 512, 1024: 128, 2048: 256, 4096: 512, 16_384: 512}),
        (2, None, {256: 256, 512: 256, 8192: 256}),
        (1, 512, {512: 512, 1024: 512, 2048: 512}),
    ],
)
def test_few_blocks_of_a_single_text_are_shorter_unless_their_length_is_given(
    batch: int, block: int | None, expected: dict[int, int]
) -> None:
    wave = wave_of(batch, block, 512, 64, 10**9)
    assert {width: wave.block_of(width) for width in expected} == expected


def test_a_block_of_an_odd_length_stays_whole() -> None:
    assert Wave(5, 8, 5, 1).block_of(10) == 5
    assert Wave(12, 8, 12, 1).block_of(24) == 3


def test_what_fits_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rnn = msrnn.MultiStateRNN(build(llama(), "cpu"), "tova", 9)
    tokens = []
    for free in (10**5, 10**7, 10**12):
        monkeypatch.setattr(wavefront, "available_bytes", lambda device, free=free: free)
        tokens.append(fitting_tokens(rnn.model, rnn.spec, last_only=True))
    assert 0 < tokens[0] < tokens[1] < tokens[2] == wavefront.IN_FLIGHT
    monkeypatch.setattr(wavefront, "LOGIT_BYTES", 40 * rnn.config.vocab_size * 4)
    assert fitting_tokens(rnn.model, rnn.spec, last_only=False) == 40


def test_frequencies_that_depend_on_the_length() -> None:
    scaled = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert changes_rope(build(llama(rope_parameters=scaled), "cpu"))
    assert not changes_rope(build(llama(), "cpu"))
    assert in_flight_together(build(llama(), "cpu"))
    quantized = build(llama(), "cpu")
    quantized.hf_quantizer = object()
    assert not in_flight_together(quantized)


def contents(state: msrnn.MultiState) -> list[Tensor]:
    """Every buffer, with what is in empty slots made equal: the order of reads does not decide that."""
    found = []
    for layer in state.layers:
        empty = (layer.position < 0).repeat_interleave(layer.keys.shape[1] // layer.position.shape[1], 1)
        for name, tensor in layer.tensors().items():
            if name in ("keys", "values"):
                found.append(tensor.float().masked_fill(empty[..., None], 0))
            elif name in ("importance", "row_weight"):
                found.append(tensor.masked_fill(layer.position < 0, 0))
            elif name in ("position", "seen"):
                found.append(tensor)
    return found


CASES: dict[str, dict[str, Any]] = {
    "tova": {},
    "head": {"policy": "tova-head"},
    "echo": {"policy": "echo"},
    "window": {"policy": "window+4"},
    "compressed": {"positions": "compressed"},
    "int8": {"state_dtype": "int8"},
    "fp8": {"state_dtype": "fp8", "policy": "h2o"},
}


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
@pytest.mark.parametrize("case", CASES)
def test_a_wave_is_one_block_after_the_other(case: str, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORTH_CAPTURING", "WORTH_CAPTURING_STEPS"):
        monkeypatch.setattr(f"msrnn.hf.cuda_graphs.{name}", 0 if captured else 10**9)
    check_wave(build(llama(num_hidden_layers=4), "cuda"), monkeypatch, **CASES[case])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["mistral-sliding", "gemma2", "gpt-oss"])
def test_waves_of_windows_and_sinks(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    captures = 10**9 if family == "gpt-oss" else 0  # experts are chosen on the host, which no graph can do
    monkeypatch.setattr("msrnn.hf.cuda_graphs.WORTH_CAPTURING", captures)
    check_wave(build(FAMILIES[family](), "cuda").to(dtype), monkeypatch, steps=family != "gpt-oss")


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
def test_short_texts_of_all_lengths_share_few_graphs(compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.hf.cuda_graphs.WORTH_CAPTURING", 0)
    model = build(llama(num_hidden_layers=4), "cuda")
    rnn = msrnn.MultiStateRNN(model, "h2o", 9, block=64, compile=compile)
    plain = msrnn.MultiStateRNN(model, "h2o", 9, backend="torch")
    for batch in (1, 3):
        for width in (1, 5, 16, 17, 33, 40, 63, 64, 64 + 20, 4 * 64 + 1):
            ids, mask = left_padded(tokens(batch, width), [0, width // 2, 3 * (width > 4)][:batch])
            mine, theirs = rnn.state(batch), plain.state(batch)
            for last_only in (True, False):
                found, expected = (r.read(ids, s, mask, last_only) for r, s in ((rnn, mine), (plain, theirs)))
                real = mask[:, -found.shape[1] :].bool()
                torch.testing.assert_close(found[real], expected[real], atol=1e-4, rtol=1e-4)
            assert torch.equal(mine.seen, theirs.seen)
            assert mine.columns == theirs.columns == 2 * width
            assert torch.equal(mine.positions(3).sort(-1).values, theirs.positions(3).sort(-1).values)
        shapes = {shape.width for shape, *_ in rnn._graphs._buffers[batch].graphs}
        assert shapes == {16, 32, 64, 256}


def check_wave(
    model: Any, monkeypatch: pytest.MonkeyPatch, /, *, steps: bool = True, policy: str = "tova", **options: Any
) -> None:
    """States and logits of blocks in flight together, and of one block after the other, with padding and a rest."""
    options |= {"policy": policy, "size": 9, "chunk": 7, "block": 16}
    ids, mask = left_padded(tokens(3, 16 * 11 + 5), [0, 6, 40])
    results = []
    for in_flight in (16 * 3 * 8, 1):
        monkeypatch.setattr(wavefront, "IN_FLIGHT", in_flight)
        rnn = msrnn.MultiStateRNN(model, **options)
        assert rnn._blocks.wave(3, last_only=True).blocks == (8 if in_flight > 1 else 1)
        state = rnn.state(3)
        logits = [rnn.read(ids, state, mask), rnn.read(ids, state, last_only=True)]
        logits += [rnn.step(ids[:, :1], state)] if steps else []
        results.append([*logits, *contents(state)])
    for waved, plain in zip(*results, strict=True):
        assert torch.equal(waved, plain)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [name for name, case in CASES.items() if "state_dtype" not in case]
)  # codes may differ
def test_a_wave_is_the_recurrence(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORTH_CAPTURING", "WORTH_CAPTURING_STEPS"):
        monkeypatch.setattr(f"msrnn.hf.cuda_graphs.{name}", 0)
    model = build(llama(num_hidden_layers=4), "cuda")
    options: dict[str, Any] = {"policy": "tova", "size": 9} | CASES[case]
    ids, mask = left_padded(tokens(2, 60), [0, 7])
    waved, plain = (
        msrnn.MultiStateRNN(model, **options, block=4),
        msrnn.MultiStateRNN(model, **options, backend="torch"),
    )
    mine, theirs = waved.state(2), plain.state(2)
    logits = waved.read(ids, mine, mask)
    steps = [plain.step(ids[:, i : i + 1], theirs, mask[:, i : i + 1]) for i in range(60)]
    expected = torch.cat(steps, dim=1)
    for row, padding in enumerate((0, 7)):
        torch.testing.assert_close(logits[row, padding:], expected[row, padding:], atol=1e-4, rtol=1e-4)
    assert torch.equal(mine.seen, theirs.seen)
    for layer in range(4):
        assert torch.equal(mine.positions(layer).sort(-1).values, theirs.positions(layer).sort(-1).values)


@pytest.mark.gpu
def test_an_interrupted_wave_leaves_a_state_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    rnn = msrnn.MultiStateRNN(build(llama(), "cuda"), "tova", 9, block=4)
    state, turns = rnn.state(), 0

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal turns
        turns += 1
        if turns == 6:
            raise KeyboardInterrupt
        return attend(self, *args, **kwargs)

    attend = msrnn.hf.cache_layers.StateLayer.attend
    monkeypatch.setattr(msrnn.hf.cache_layers.StateLayer, "attend", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rnn.read(tokens(1, 40), state)
    monkeypatch.undo()
    with pytest.raises(UsageError, match="interrupted inside a forward pass"):
        rnn.step(tokens(1, 1), state)
    state.reset()
    fresh = rnn.state()
    assert torch.equal(rnn.read(tokens(1, 40), state), rnn.read(tokens(1, 40), fresh))


@pytest.mark.gpu
def test_memory_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.hf.cuda_graphs.WORTH_CAPTURING", 0)
    monkeypatch.setattr(wavefront, "IN_FLIGHT", 64)
    rnn = msrnn.MultiStateRNN(build(llama(), "cuda"), "tova", 9, block=8)
    state = rnn.state()
    peaks = []
    for length in (64, 128, 64 * 20):
        ids = tokens(1, length).to("cuda")
        rnn.read(ids, state, last_only=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        rnn.read(ids, state, last_only=True)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[2] - peaks[1] <= 64 * 20 * 8 * 2


@pytest.mark.gpu
def test_short_texts_in_shorter_blocks_are_the_recurrence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BLOCK_TOKENS": 32, "LEAST_TOKENS": 8, "SHORTEST_BLOCK": 4}.items():
        monkeypatch.setattr(wavefront, name, value)
    monkeypatch.setattr("msrnn.hf.cuda_graphs.WORTH_CAPTURING", 0)
    model = build(llama(num_hidden_layers=4), "cuda")
    waved = msrnn.MultiStateRNN(model, "echo", 9)
    plain = msrnn.MultiStateRNN(model, "echo", 9, backend="torch")
    for width in (32, 64, 128, 256, 64 + 32 + 7):
        mine, theirs, ids = waved.state(), plain.state(), tokens(1, width)
        found, expected = (rnn.read(ids, state) for rnn, state in ((waved, mine), (plain, theirs)))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(mine.positions(3).sort(-1).values, theirs.positions(3).sort(-1).values)
    shapes = {tuple(shape) for shape, *_ in waved._graphs._buffers[1].graphs}
    assert {(64, 8), (128, 16), (256, 32)} <= shapes
