from __future__ import annotations

from pathlib import Path

import pytest
import torch

import msrnn
from msrnn.core.quantization import LARGEST, STATE_DTYPES, quantize
from tests.helpers.tiny import build, llama, tokens

every = pytest.mark.parametrize("name", STATE_DTYPES)


def rows(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return (torch.randn(2000, 64, generator=draw) * torch.logspace(-3, 3, 2000)[:, None]).to(dtype)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_number_takes_the_largest_code(name: str, dtype: torch.dtype) -> None:
    code = STATE_DTYPES[name]
    codes, scale = quantize(rows(dtype), code)
    assert codes.dtype == code
    assert scale is not None
    assert (codes.float().abs().amax(-1) >= 0.99 * LARGEST[code]).all()


@pytest.mark.parametrize(("name", "error"), [("int8", 0.51 / 127), ("fp8", 2**-4)])
def test_what_is_left_is_near(name: str, error: float) -> None:
    """int8 is as fine everywhere; fp8 keeps a share of each number."""
    numbers = rows()
    left = quantize(numbers, STATE_DTYPES[name]).dequantized(numbers.dtype)
    top = numbers.abs().amax(-1, keepdim=True)
    allowed = error * (top if name == "int8" else numbers.abs() + top / 448 / 2**6)
    assert ((left - numbers).abs() <= 1.01 * allowed).all()


@every
def test_to_round_twice_is_to_round_once(name: str) -> None:
    once = quantize(rows(), STATE_DTYPES[name]).dequantized(torch.float32)
    assert torch.equal(quantize(once, STATE_DTYPES[name]).dequantized(torch.float32), once)


@every
def test_zeros_stay_zeros(name: str) -> None:
    assert (quantize(torch.zeros(3, 4), STATE_DTYPES[name]).dequantized(torch.float32) == 0).all()


@every
def test_half_the_bytes(name: str) -> None:
    model = build(llama(hidden_size=6 * 64)).to(torch.bfloat16)
    wide, narrow = (msrnn.MultiStateRNN(model, "tova", 100, state_dtype=d).state(3).nbytes for d in (None, name))
    assert narrow <= 0.55 * wide


@every
def test_rounded_states_are_saved_and_forked_and_told_apart(name: str, tmp_path: Path) -> None:
    model = build(llama())
    rnn = msrnn.MultiStateRNN(model, "h2o", 10, state_dtype=name)
    state = rnn.state(2)
    rnn.read(tokens(2, 30), state)
    state.save(tmp_path / "state")
    loaded = rnn.load_state(tmp_path / "state")
    forked = state.fork(2)
    expected = rnn.step(tokens(2, 1), state)
    assert torch.equal(rnn.step(tokens(2, 1), loaded), expected)
    again = rnn.step(tokens(2, 1).repeat_interleave(2, 0), forked)[::2]
    torch.testing.assert_close(again, expected, atol=1e-5, rtol=1e-5)  # a batch of another size may round otherwise
    with pytest.raises(ValueError, match=f"dtype '{name}', and this model has dtype 'float32'"):
        msrnn.MultiStateRNN(model, "h2o", 10).load_state(tmp_path / "state")


@every
def test_generate_and_read_agree(name: str, device: str) -> None:
    rnn = msrnn.MultiStateRNN(build(llama(eos_token_id=None), device), "tova", 10, state_dtype=name)
    out = rnn.generate(tokens(1, 20), max_new_tokens=12, do_sample=False)
    logits = rnn.read(out[:, :-1], rnn.state())
    assert torch.equal(logits[:, 19:].argmax(-1), out[:, 20:])


def test_what_cannot_be_rounded_is_refused() -> None:
    model = build(llama())
    with pytest.raises(ValueError, match="state_dtype='int4': must be None, one of 'int8', 'fp8'"):
        msrnn.MultiStateRNN(model, "tova", 10, state_dtype="int4")
    with pytest.raises(ValueError, match="policy 'full' does not quantize"):
        msrnn.MultiStateRNN(model, "full", state_dtype="int8")
