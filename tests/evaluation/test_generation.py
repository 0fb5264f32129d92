"""Answers of an engine for evaluations: each as it is alone, and a document is read once for all its questions."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from msrnn.engine.engine import Engine
from msrnn.engine.offline import full_model_rnn
from msrnn.engine.requests import SamplingParams
from msrnn.errors import UsageError
from msrnn.evaluation.generation import answer_in_batches, answer_prompts
from msrnn.hf.rnn import MultiStateRNN
from tests.helpers.characters import character_tokenizer
from tests.helpers.tiny import build, llama, tokens

VOCABULARY = len(character_tokenizer())
DOCUMENT, OTHER = tokens(1, 90)[0].tolist(), tokens(1, 70, seed=2)[0].tolist()
LONG, LONGER = tokens(1, 40, seed=3)[0].tolist(), tokens(1, 45, seed=4)[0].tolist()  # beginnings that questions share
PROMPTS = [
    [*DOCUMENT, *LONG, 5, 6, 7],
    [*OTHER, 5],
    [*DOCUMENT, VOCABULARY - 1],  # after those that share more, in order
    [9, 10],
    [*DOCUMENT, *LONG, 8],
    [*DOCUMENT, *LONGER, 3, 4],
    [*DOCUMENT, *LONGER, 7],
    [*OTHER, 6, 6],
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama(vocab_size=VOCABULARY))


def greedy(most: int, *stops: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=most, stop_token_ids=stops, ignore_eos=True)


def all_answers(
    rnn: MultiStateRNN,
    prompts: list[list[int]],
    params: SamplingParams,
    slots: int = 3,
    counted: list[int] | None = None,
) -> list[list[int]]:
    count = list[int]().append if counted is None else counted.append
    found = {one.number: one.tokens for one in answer_prompts(Engine.offline(rnn, slots), prompts, params, count)}
    return [found[number] for number in range(len(prompts))]


@pytest.mark.parametrize(("policy", "size"), [("full", 200), ("tova", 16), ("echo", 11), ("window+4", 64)])
def test_beside_others_as_alone(model: PreTrainedModel, policy: str, size: int) -> None:
    rnn = full_model_rnn(model, size) if policy == "full" else MultiStateRNN(model, policy, size)
    plain = MultiStateRNN(model, policy, size)
    for prompt, answer in zip(PROMPTS, all_answers(rnn, PROMPTS, greedy(8)), strict=True):
        logits = plain.read(torch.tensor([prompt + answer[:-1]]), plain.state())
        assert answer == logits[0, len(prompt) - 1 :].argmax(-1).tolist()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of prompts that are read, call by call."""
    original, count = MultiStateRNN.read, list[int]()

    def noted(self: MultiStateRNN, ids: torch.Tensor, *arguments: object, **named: object) -> torch.Tensor:
        count.append(ids.numel())
        return original(self, ids, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(MultiStateRNN, "read", noted)
    return count


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_what_is_shared_is_read_once(model: PreTrainedModel, read: list[int], rows: int) -> None:
    """A document, and the beginnings that some of its questions share, too."""
    all_answers(MultiStateRNN(model, "tova", 16), PROMPTS, greedy(2), rows)
    beginnings = len(DOCUMENT) + len(LONG) + len(LONGER) + len(OTHER)
    assert sum(read) == beginnings + (3 + 1 + 1 + 2 + 1) + (1 + 2) + 2


def test_a_document_with_many_questions_is_read_once(model: PreTrainedModel, read: list[int]) -> None:
    """More questions than rows and than kept states, all of which end at the same step."""
    many = [[*some, token, token] for some in (DOCUMENT, OTHER) for token in range(10, 40)]
    all_answers(full_model_rnn(model, 100), many, greedy(3), slots=7)
    assert sum(read) == len(DOCUMENT) + len(OTHER) + 2 * len(many)


@pytest.mark.parametrize("prompts", [PROMPTS, [[4], [5]], [[7]]])
def test_all_tokens_are_counted(model: PreTrainedModel, prompts: list[list[int]]) -> None:
    """Also those of answers that ended early."""
    rnn, counted = MultiStateRNN(model, "tova", 16, block=8), list[int]()
    whole = all_answers(rnn, prompts, greedy(5), counted=counted)
    assert sum(counted) == sum(len(prompt) + 5 for prompt in prompts)
    counted.clear()
    cut = all_answers(rnn, prompts, greedy(5, whole[0][2]), counted=counted)
    assert sum(counted) == sum(len(prompt) + 5 for prompt in prompts)
    assert len(cut[0]) <= 2


def test_an_answer_ends_where_the_model_ends_it(model: PreTrainedModel) -> None:
    rnn = MultiStateRNN(model, "tova", 16)
    whole = all_answers(rnn, PROMPTS, greedy(12))
    assert [len(row) for row in whole] == [12] * len(PROMPTS)
    for end in {row[5] for row in whole}:
        cut = all_answers(rnn, PROMPTS, greedy(12, end))
        assert cut == [row[: row.index(end)] if end in row else row for row in whole]


def test_seconds_are_those_of_all(model: PreTrainedModel) -> None:
    rnn = MultiStateRNN(model, "tova", 16)
    found = [*answer_prompts(Engine.offline(rnn, 2), PROMPTS, greedy(4), lambda _: None)]
    assert sorted(one.number for one in found) == [*range(len(PROMPTS))]
    assert all(one.seconds >= 0 for one in found)
    assert sum(one.seconds for one in found) > 0


def test_numbers_that_are_not_finite_are_no_answer() -> None:
    model = build(llama(vocab_size=VOCABULARY))
    engine = Engine.offline(MultiStateRNN(model, "tova", 16), 2)
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(UsageError, match="prompt 1 of 1: the model computed numbers that are not finite"):
        next(answer_prompts(engine, [[5, 6]], greedy(4), lambda _: None))


@pytest.mark.parametrize(("policy", "size"), [("full", None), ("tova", 20)])
@pytest.mark.parametrize("batch", [1, 3])
def test_batches_of_prompts_are_answered_as_each_alone(
    model: PreTrainedModel, policy: str, size: int | None, batch: int
) -> None:
    """Padding changes nothing; each answer ends at its own stop token or limit."""
    rnn = MultiStateRNN(model, policy, size)
    alone = []
    for prompt in PROMPTS:
        out = rnn.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False, eos_token_id=-1)
        alone.append(out[0, len(prompt) :].tolist())
    stop = alone[0][4]
    limits = [9 if i % 2 else 5 for i in range(len(PROMPTS))]
    counted: list[int] = []
    params = [greedy(most, stop) for most in limits]
    found = {one.number: one.tokens for one in answer_in_batches(rnn, PROMPTS, params, batch, counted.append)}
    for number, (answer, most) in enumerate(zip(alone, limits, strict=True)):
        answer = answer[:most]
        assert found[number] == (answer[: answer.index(stop)] if stop in answer else answer)
    assert sum(counted) == sum(map(len, PROMPTS)) + sum(limits)


def test_batches_of_prompts_follow_no_generation_config() -> None:
    """The engine does not, either: otherwise the full model would answer by other rules than the bounded one."""
    model = build(llama(vocab_size=VOCABULARY))
    params = [greedy(9)] * len(PROMPTS)
    plain, other = (
        [
            one.tokens
            for one in answer_in_batches(MultiStateRNN(model, "full", None), PROMPTS, params, 3, lambda _: None)
        ]
        for model.generation_config.repetition_penalty in (1.0, 9.0)
    )
    assert plain == other


def test_batches_of_prompts_refuse_numbers_that_are_not_finite() -> None:
    model = build(llama(vocab_size=VOCABULARY))
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    rnn, params = MultiStateRNN(model, "full", None), [greedy(2)] * len(PROMPTS)
    answers = answer_in_batches(rnn, PROMPTS, params, 8, lambda _: None)
    with pytest.raises(UsageError, match="not finite"):
        next(answers)
