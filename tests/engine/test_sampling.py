"""How a token is chosen: limits, penalties and noise, against transformers' own processors where it has them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from msrnn.engine.constraint import Constraint
from msrnn.engine.executor import FAILED, NOT_FINITE, TOO_COMPLEX, SamplerSpec
from msrnn.engine.grammars import Grammars
from msrnn.engine.requests import SamplingParams
from msrnn.engine.sampling import Chosen, SequenceSampler, choose, choose_ahead
from tests.helpers.byte_tokenizer import END, byte_tokenizer

VOCABULARY = 50
CPU = torch.device("cpu")


def logits(rows: int = 1, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def sampler(seed: int = 0, prompt: list[int] | None = None, **params: Any) -> SequenceSampler:
    return SequenceSampler(SamplerSpec(SamplingParams(**params), seed, prompt or [1]), VOCABULARY, CPU)


def drawn(count: int, **params: Any) -> Counter[int]:
    rows = [sampler(seed, **params) for seed in range(count)]
    return Counter(choose(logits().expand(count, -1), rows).tokens.tolist())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_in_which_nothing_is_left_has_no_token(temperature: float) -> None:
    """Only token 7 may come next, and the model rules it out."""
    tokenizer = byte_tokenizer()
    grammars = Grammars(tokenizer, 272, [END])
    row = torch.randn(2, 272, generator=torch.Generator().manual_seed(0))
    row[0, tokenizer("a").input_ids[0]] = -torch.inf
    params = SamplingParams(temperature=temperature)
    specs = [SamplerSpec(params, 0, [1], (), grammars.start(Constraint.regex("a"))) for _ in range(2)]
    rows = [SequenceSampler(spec, 272, CPU) for spec in specs]
    assert choose(row, rows).tokens.tolist() == [TOO_COMPLEX, tokenizer("a").input_ids[0]]


def test_samples_follow_the_distribution() -> None:
    count = 4000
    found = drawn(count, temperature=1.5)
    expected = (logits()[0] / 1.5).softmax(-1) * count
    for token in range(VOCABULARY):
        spread = float(expected[token]) ** 0.5 + 1
        assert abs(found[token] - float(expected[token])) < 5 * spread


@pytest.mark.parametrize(
    ("params", "warper"),
    [
        ({"top_k": 5}, tf.TopKLogitsWarper(5)),
        ({"top_p": 0.8}, tf.TopPLogitsWarper(0.8)),
        ({"min_p": 0.1}, tf.MinPLogitsWarper(0.1)),
    ],
)
def test_limits_are_those_of_transformers(params: dict[str, Any], warper: Any) -> None:
    kept = set(warper(None, logits() / 1.5)[0].isfinite().nonzero()[:, 0].tolist())
    found = drawn(3000, temperature=1.5, **params)
    assert set(found) <= kept
    likely = (logits()[0] / 1.5).softmax(-1)
    assert {token for token in kept if likely[token] > 0.01} <= set(found)


def test_the_most_likely_token_is_always_among_those_that_are_left() -> None:
    assert set(drawn(50, temperature=3.0, top_p=1e-6)) == {int(logits().argmax())}
    assert set(drawn(50, temperature=3.0, min_p=1.0)) == {int(logits().argmax())}
    assert set(drawn(50, temperature=1e-9)) == {int(logits().argmax())}


def test_repetition_penalty_is_that_of_transformers() -> None:
    prompt = [3, 7, 11]
    row = sampler(prompt=prompt, repetition_penalty=1.7)
    expected = tf.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt]), logits())
    torch.testing.assert_close(row.adjust(logits()[0]), expected[0])
    row.count(Chosen(torch.tensor([20]), (), ()), 0)
    expected = tf.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[*prompt, 20]]), logits())
    torch.testing.assert_close(row.adjust(logits()[0]), expected[0])


def test_presence_and_frequency_count_the_answer_only() -> None:
    row = sampler(prompt=[3, 7], presence_penalty=0.5, frequency_penalty=0.25)
    for token in (20, 20, 21):
        row.count(Chosen(torch.tensor([token]), (), ()), 0)
    difference = row.adjust(logits()[0]) - logits()[0]
    assert difference.nonzero()[:, 0].tolist() == [20, 21]
    torch.testing.assert_close(difference[[20, 21]], torch.tensor([-1.0, -0.75]))


def test_a_bias_forces_and_forbids() -> None:
    best = int(logits().argmax())
    assert set(drawn(20, temperature=0, logit_bias={best: -100})) == {int(logits()[0].topk(2).indices[1])}
    assert set(drawn(20, temperature=1, logit_bias={5: 100})) == {5}


def test_log_probabilities_are_the_models_own() -> None:
    row = sampler(temperature=0.2, logprobs=3, logit_bias={5: 50}, seed=1)
    chosen = choose(logits(), [row])
    found, expected = chosen.on_host()[1][0], logits()[0].log_softmax(-1)
    assert chosen.tokens.tolist() == [5]
    assert found.chosen == pytest.approx(float(expected[5]))
    assert [token for token, _ in found.top] == expected.topk(3).indices.tolist()
    assert [value for _, value in found.top] == pytest.approx(expected.topk(3).values.tolist())
    assert choose(logits(), [sampler(temperature=0, logprobs=0)]).on_host()[1][0].top == []


def test_a_row_alone_and_among_others() -> None:
    ways: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1},
        {"temperature": 1, "top_p": 0.7},
        {"temperature": 2, "top_k": 3, "presence_penalty": 1.0},
        {"temperature": 2, "min_p": 0.05, "logit_bias": {3: 4.0}},
    ] * 4
    every = logits(len(ways))
    together = choose(every, [sampler(i, **way) for i, way in enumerate(ways)]).tokens.tolist()
    alone = [choose(every[i : i + 1], [sampler(i, **way)]).tokens.tolist()[0] for i, way in enumerate(ways)]
    assert together == alone


def test_logits_that_are_no_numbers_are_marked() -> None:
    broken = logits(2)
    broken[0, 7] = torch.nan
    assert choose(broken, [sampler(temperature=1), sampler(temperature=0)]).tokens[0] == -1
    assert choose(broken, [sampler(temperature=1), sampler(temperature=0)]).tokens[1] >= 0


def test_a_top_p_that_float32_does_not_tell_from_0() -> None:
    rows = [sampler(seed, temperature=2.0, top_p=0.5) for seed in range(50)]
    for row in rows:
        object.__setattr__(row.params, "top_p", 1e-46)
    assert set(choose(logits().expand(50, -1), rows).tokens.tolist()) == {int(logits().argmax())}


@pytest.mark.parametrize("params", [{"repetition_penalty": 0.01}, {"repetition_penalty": 100}, {"top_k": 2**31 - 1}])
@pytest.mark.parametrize("temperature", [0, 1e-300, 100])
def test_extreme_values_give_tokens(params: dict[str, Any], temperature: float) -> None:
    rows = [sampler(seed, [1, 2, 3], temperature=temperature, **params) for seed in range(8)]
    for _ in range(4):
        assert min(choose(1e4 * logits(8), rows).tokens.tolist()) >= 0


def test_a_row_that_cannot_be_sampled_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(SequenceSampler):
        def adjust(self, logits: Tensor) -> Tensor:
            raise OverflowError("int too large to convert to float")

    sound = [sampler(seed, temperature=0.5 * seed, repetition_penalty=1.0 + seed) for seed in range(4)]
    twins = [sampler(seed, temperature=0.5 * seed, repetition_penalty=1.0 + seed) for seed in range(4)]
    broken = Broken(SamplerSpec(SamplingParams(repetition_penalty=2.0), 0, [1]), VOCABULARY, CPU)
    for _ in range(3):
        found = choose(logits(5), [*sound[:2], broken, *sound[2:]]).tokens.tolist()
        expected = choose(logits(5)[[0, 1, 3, 4]], twins).tokens.tolist()
        assert found == [*expected[:2], FAILED, *expected[2:]]
    assert "OverflowError" in caplog.text


def test_logits_that_are_not_finite_are_no_token() -> None:
    values = logits(3)
    values[1, 7], values[2, 7] = float("nan"), float("inf")
    tokens = choose(values, [sampler(temperature=1.0) for _ in range(3)]).tokens.tolist()
    assert tokens[0] >= 0
    assert tokens[1:] == [NOT_FINITE, NOT_FINITE]


def test_stop_tokens_are_not_chosen_before_the_least_tokens() -> None:
    best = logits()[0].topk(4).indices.tolist()
    ways: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1, "top_k": 1},
        {"temperature": 5, "logit_bias": {best[0]: 100}},
        {"temperature": 1, "top_p": 1e-6, "min_p": 1.0},
    ]
    for way in ways:
        row = SequenceSampler(SamplerSpec(SamplingParams(min_tokens=2, **way), 1, [1], best[:2]), VOCABULARY, CPU)
        first, second, third = (int(choose(logits(), [row]).tokens) for _ in range(3))
        assert not {first, second} & {*best[:2]}
        assert third == best[0]  # no longer masked


def test_stop_tokens_that_the_model_does_not_have() -> None:
    spec = SamplerSpec(SamplingParams(min_tokens=1, temperature=0), 1, [1], [VOCABULARY, 10**6])
    row = SequenceSampler(spec, VOCABULARY, CPU)
    assert row.is_plain
    assert int(choose(logits(), [row]).tokens) == int(logits().argmax())


def test_a_masked_row_and_its_neighbours() -> None:
    every, best = logits(3), logits(3).argmax(-1).tolist()
    specs = [SamplerSpec(SamplingParams(min_tokens=n, temperature=0), 1, [1], best) for n in (0, 1)]
    rows = [SequenceSampler(spec, VOCABULARY, CPU) for spec in specs]
    assert choose(every, [rows[0], rows[1], sampler(temperature=0)]).tokens.tolist()[::2] == best[::2]
    assert rows[1].is_plain  # it costs nothing from then on


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 1.3, "top_p": 0.9, "logprobs": 3},
        {"temperature": 1, "logit_bias": {3: 5.0}, "min_tokens": 4},
    ],
    ids=str,
)
def test_tokens_that_are_chosen_ahead_are_those_of_one_step_after_the_other(params: dict[str, Any]) -> None:
    rows = logits(8)
    rows[5, 0] = torch.nan
    spec = SamplerSpec(SamplingParams(**params), 5, [1, 2], (4, 3))
    ahead, stepping = (SequenceSampler(spec, VOCABULARY, CPU) for _ in range(2))
    choose(rows[:1], [ahead])
    choose(rows[:1], [stepping])
    tokens, found = choose_ahead(rows, ahead)
    assert ahead.counts_only
    assert ahead.number == 1, "the caller counts those that stay"
    expected = [choose(row[None], [stepping]).on_host() for row in rows]
    assert str([one.on_host() for one in found]) == str(expected), "also where a number is NaN"
    assert tokens.tolist() == [one[0][0] for one in expected]
    assert tokens[5] == NOT_FINITE


def test_a_sampler_that_looks_back_is_not_asked_ahead() -> None:
    assert not sampler(frequency_penalty=0.5).counts_only
    assert sampler(temperature=0.5, min_p=0.1).counts_only
