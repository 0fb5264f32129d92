from __future__ import annotations

import math

import pytest
import torch
from transformers import PreTrainedModel

from msrnn.evaluation.benchmark import reading
from msrnn.evaluation.benchmark.reading import estimate_seconds, measure, tokens_of
from msrnn.evaluation.benchmark.timing import Times
from msrnn.evaluation.loss import losses
from msrnn.hf.rnn import MultiStateRNN
from tests.helpers.tiny import build, llama, tokens


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama())


@pytest.mark.parametrize("piece", [8, 100], ids=["the end of the text", "all of it"])
def test_a_measurement(piece: int, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading parts again to time them changes neither the perplexity nor the state."""
    monkeypatch.setattr(reading, "PIECE", piece)
    monkeypatch.setattr("msrnn.evaluation.benchmark.timing.ROUNDS", 1)
    ids, read = tokens(1, 20), list[int]()
    rnn = MultiStateRNN(model, "tova", 8)
    (found,), (state,) = measure([rnn], ids, [read.append])
    whole = rnn.state()
    assert found.perplexity == pytest.approx(math.exp(losses(rnn, ids, whole).mean().item()), rel=1e-5)
    assert (found.policy, found.rows, found.nbytes) == ("tova", 8, state.nbytes)
    assert (sum(read), state.seen.tolist()) == (tokens_of(20), [19])
    assert torch.allclose(rnn.step(ids[:, -1:], state), rnn.step(ids[:, -1:], whole), atol=1e-5)


def test_times_are_medians_of_several_runs(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 19 tokens each, and of single steps; the policies are timed in turns."""
    prefills, steps = [(19.0, 190.0), (38.0, 380.0), (38.0, 380.0), (38.0, 380.0), (190.0, 1900.0)], [(7.0, 9.0)] * 15
    times = iter([*[500.0] * 2, *sum(prefills, ()), *[500.0] * 6, *sum(steps, ())])
    monkeypatch.setattr("msrnn.evaluation.benchmark.timing._once", lambda *_: next(times))
    rnns = [MultiStateRNN(model, policy, 8) for policy in ("tova", "window")]
    (one, two), _ = measure(rnns, tokens(1, 20), [lambda _: None] * 2)
    assert (one.policy, one.reading, one.decoding) == ("tova", Times(2.0, 1.0, 10.0), Times(7.0, 7.0, 7.0))
    assert (two.policy, two.reading, two.decoding) == ("window", Times(20.0, 10.0, 100.0), Times(9.0, 9.0, 9.0))
    assert one.steady
    assert not one._replace(decoding=Times(7.0, 1.0, 9.0, steady=False)).steady


def test_an_estimate_is_the_time_of_a_token_times_the_tokens(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([10.0, 12.0])
    monkeypatch.setattr(reading, "perf_counter", lambda: next(clock))
    assert estimate_seconds(MultiStateRNN(model, "tova", 8), tokens(1, 20)) == pytest.approx(2 / 20 * 7 * 19)
