from __future__ import annotations

from pathlib import Path

import pytest
import torch

import msrnn
from msrnn.engine.executor import SamplerSpec
from msrnn.engine.local_executor import LocalExecutor, local, require_logits
from msrnn.engine.requests import SamplingParams
from msrnn.errors import UsageError
from tests.helpers.characters import END, character_tokenizer
from tests.helpers.fake_executor import FakeState
from tests.helpers.tiny import FAMILIES, VOCABULARY, build, llama, tokens

PROMPT = tokens(1, 12)[0].tolist()
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def rnn() -> msrnn.MultiStateRNN:
    return msrnn.MultiStateRNN(build(llama(), "cpu"), "tova", 6)


@pytest.fixture
def executor(rnn: msrnn.MultiStateRNN) -> LocalExecutor:
    return LocalExecutor(rnn, slots=3)


def test_facts(rnn: msrnn.MultiStateRNN, executor: LocalExecutor) -> None:
    facts = executor.facts
    assert (facts.slots, facts.device, facts.overlaps, facts.vocabulary) == (3, "cpu", False, VOCABULARY)
    assert facts.slot_nbytes == rnn.state().nbytes
    assert (facts.model, facts.mean_size, [*facts.sizes]) == (rnn.model, 6, [6, 6])
    assert LocalExecutor(rnn).facts.slots == 8


def test_a_prompt_in_parts_and_the_answer_are_those_of_generate(
    rnn: msrnn.MultiStateRNN, executor: LocalExecutor
) -> None:
    expected = rnn.generate(torch.tensor([PROMPT]), max_new_tokens=5, do_sample=False, eos_token_id=None)[
        0, 12:
    ].tolist()
    state = executor.new_state()
    assert not state.has_logits
    assert executor.read(state, PROMPT[:5]) == []
    executor.read(state, PROMPT[5:])
    assert (state.seen, state.has_logits) == (12, True)
    samplers = [executor.new_sampler(state, SamplerSpec(GREEDY, 0, PROMPT)) for _ in range(2)]
    found = [executor.put(1, state, samplers).on_host()[0]]
    executor.move(1, 0)
    executor.move(2, 1)
    found += [executor.step(samplers).on_host()[0] for _ in range(4)]
    assert [*zip(*found, strict=True)] == [tuple(expected)] * 2
    taken = executor.take(0, 16)
    assert (taken.seen, taken.has_logits) == (16, False)
    assert executor.slot_retention(0).list_shares() == executor.retention(taken).list_shares()


def test_log_probabilities_of_a_prompt(rnn: msrnn.MultiStateRNN, executor: LocalExecutor) -> None:
    state = executor.new_state()
    found = [*executor.read(state, PROMPT[:5], logprobs=2), *executor.read(state, PROMPT[5:], logprobs=2)]
    assert found[0] is None  # nothing predicts it
    expected = rnn.read(torch.tensor([PROMPT]), rnn.state())[0].log_softmax(-1)
    for place, scored in enumerate(found[1:], 1):
        assert scored is not None
        assert scored.chosen == pytest.approx(float(expected[place - 1, PROMPT[place]]), abs=1e-4)
        assert [token for token, _ in scored.top] == expected[place - 1].topk(2).indices.tolist()


def test_a_copy_does_not_change_with_its_origin(executor: LocalExecutor) -> None:
    state = executor.new_state()
    executor.read(state, PROMPT)
    copy = executor.copy(state, "host", wait=False)
    assert copy.nbytes == state.nbytes
    before = require_logits(copy).clone()
    executor.read(state, [5, 6])
    assert (copy.seen, state.seen) == (12, 14)
    assert torch.equal(require_logits(copy), before)
    assert not torch.equal(require_logits(state), before)


def test_a_saved_state_continues(executor: LocalExecutor, tmp_path: Path) -> None:
    state, path = executor.new_state(), tmp_path / "state.safetensors"
    executor.read(state, PROMPT)
    executor.save(state, path, {"turns": 3})
    described = executor.describe(path)
    assert (described["notes"], described["columns"]) == ({"turns": 3}, [12, 12])
    loaded = executor.load(path)
    assert (loaded.seen, loaded.has_logits, loaded.fingerprint) == (12, False, executor.facts.fingerprint)
    for one in (state, loaded):
        executor.read(one, [5])
    torch.testing.assert_close(require_logits(loaded), require_logits(state))


def test_states_are_converted_for_other_positions(rnn: msrnn.MultiStateRNN, executor: LocalExecutor) -> None:
    longer = LocalExecutor(msrnn.MultiStateRNN(rnn.model, "tova", 6, positions="compressed"), slots=1)
    state = executor.new_state()
    executor.read(state, PROMPT)
    assert executor.convert(state) is state
    converted = longer.convert(state)
    assert (converted.fingerprint, converted.has_logits, converted.seen) == (longer.facts.fingerprint, False, 12)


def test_lengths_that_the_model_cannot_take() -> None:
    executor = LocalExecutor(msrnn.MultiStateRNN(build(FAMILIES["gpt2"]()), "tova", 6), slots=1)
    executor.check_length(512)
    with pytest.raises(UsageError, match="512"):
        executor.check_length(513)


def test_stop_tokens(executor: LocalExecutor) -> None:
    assert executor.stop_tokens(None) == {2}
    assert executor.stop_tokens(character_tokenizer()) == {2, END}


def test_a_warm_up_changes_no_state(executor: LocalExecutor) -> None:
    state = executor.new_state()
    parts = executor.plan_warm_up(40, guesses=3)
    assert [*map(str, parts)] == ["prompt of 16 tokens", "step of 1 answer"]  # a CPU captures nothing
    for part in parts:
        executor.warm_up(part)
    assert state.seen == 0
    executor.read(state, PROMPT)
    expected = executor.new_state()
    executor.read(expected, PROMPT)
    torch.testing.assert_close(state.logits, expected.logits, atol=0, rtol=0)


def test_prompts_are_prepared_as_they_are_read(rnn: msrnn.MultiStateRNN) -> None:
    together = LocalExecutor(rnn, slots=2, together=2)
    for longest, widths in ((16, []), (32, [16]), (100, [16, 32]), (4096, [16, 32, 64, 128, 256, 512])):
        parts = together.plan_warm_up(longest)
        assert [part.number for part in parts if part.what == "prompts"] == widths
        for part in parts[:2]:
            together.warm_up(part)


def test_states_that_cannot_be_used(executor: LocalExecutor) -> None:
    with pytest.raises(ValueError, match="a state without logits: read a token first"):
        executor.new_sampler(executor.new_state(), SamplerSpec(GREEDY, 0, PROMPT))
    with pytest.raises(TypeError, match="not a state of a LocalExecutor"):
        local(FakeState())
