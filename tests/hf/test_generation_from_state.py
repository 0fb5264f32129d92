"""`generate` from a state: it decodes on the given state, which then continues after the answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria

import msrnn
from msrnn.errors import UsageError
from tests.helpers.tiny import build, greedy, left_padded, llama, tokens


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama(eos_token_id=None))


def count_tokens(model: PreTrainedModel) -> tuple[list[int], Any]:
    """The tokens of every forward pass from now on, and a handle that ends it."""
    seen: list[int] = []
    handle = model.get_input_embeddings().register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].numel()))
    return seen, handle


def test_no_token_is_read_twice(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    state = rnn.state()
    read, handle = count_tokens(model)
    rnn.generate(tokens(1, 20), state=state, **greedy())
    handle.remove()
    assert sum(read) == 30 == int(state.seen)


class EndsAt(StoppingCriteria):
    """Ends row b after `lengths[b]` columns."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return input_ids.shape[1] >= self.lengths


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("policy", ["tova", "echo", "window+2"])
def test_rows_that_ended_keep_their_states(model: PreTrainedModel, policy: str, hidden: bool) -> None:
    rnn, ids = msrnn.MultiStateRNN(model, policy, 9), tokens(3, 14)
    state = rnn.state(3)
    rnn.read(tokens(3, 12, seed=4), state)
    alone = [state.select([row]) for row in range(3)]
    lengths = (17, 22, 15)
    out = rnn.generate(
        ids,
        state=state,
        stopping_criteria=StoppingCriteriaList([EndsAt(*lengths)]),
        output_hidden_states=hidden,
        return_dict_in_generate=True,
        **greedy(pad_token_id=0),
    ).sequences
    assert state.seen.tolist() == [12 + length for length in lengths]
    probe = tokens(1, 1, seed=9)
    together = rnn.step(probe.expand(3, 1), state)
    for row, length in enumerate(lengths):
        rnn.read(out[row : row + 1, :length], alone[row])
        torch.testing.assert_close(rnn.step(probe, alone[row])[0], together[row], atol=1e-4, rtol=1e-4)


def test_an_interrupted_call_leaves_what_was_read(model: PreTrainedModel) -> None:
    class Stops(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
            if input_ids.shape[1] == 24:
                raise KeyboardInterrupt
            return torch.zeros(len(input_ids), dtype=torch.bool)

    rnn, ids = msrnn.MultiStateRNN(model, "tova", 9), tokens(1, 20)
    whole = rnn.generate(ids, **greedy())
    state = rnn.state()
    with pytest.raises(KeyboardInterrupt):
        rnn.generate(ids, state=state, stopping_criteria=StoppingCriteriaList([Stops()]), **greedy())
    assert int(state.seen) == 23  # the newest token was chosen, and not read
    rest = rnn.generate(whole[:, 23:24], state=state, **greedy(max_new_tokens=6))
    assert torch.equal(rest[:, 1:], whole[:, 24:])


def test_a_loop_that_feeds_other_tokens_is_refused(model: PreTrainedModel) -> None:
    def loop(model: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        """Reads one token, and returns others."""
        cache = {"past_key_values": kwargs["past_key_values"]}
        model(input_ids, **cache)
        model(torch.full_like(input_ids[:, :1], 5), **cache)
        chosen = torch.full_like(input_ids[:, :2], 7)
        from transformers.generation import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(sequences=torch.cat([input_ids, chosen], dim=1))

    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    state = rnn.state()
    with pytest.raises(UsageError, match="feeds other tokens than it returns"):
        rnn.generate(tokens(1, 12), state=state, custom_generate=loop, **greedy())
    with pytest.raises(UsageError, match="interrupted inside a forward pass"):
        rnn.step(tokens(1, 1), state)


def test_a_masked_step_leaves_a_row_as_it_is(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "echo", 6)
    state = rnn.state(2)
    rnn.read(tokens(2, 11), state)
    before = state.fork(1)
    logits = rnn.step(tokens(2, 1, seed=3), state, torch.tensor([[1], [0]]))
    assert state.seen.tolist() == [12, 11]
    torch.testing.assert_close(logits[0], rnn.step(tokens(2, 1, seed=3)[:1], before.select([0]))[0])
    after = rnn.step(tokens(1, 1, seed=5), state.select([1]))
    torch.testing.assert_close(after, rnn.step(tokens(1, 1, seed=5), before.select([1])))


def test_a_given_criterion_replaces_the_configured_one(model: PreTrainedModel) -> None:
    """As in transformers: the row goes on past the configured stop token, and so does its state."""
    rnn, ids = msrnn.MultiStateRNN(model, "tova", 9), tokens(3, 14)
    plain = rnn.generate(ids, **greedy())
    ignored, stop = int(plain[0, 15]), int(plain[0, 18])
    kwargs = greedy(
        eos_token_id=ignored, stopping_criteria=StoppingCriteriaList([EosTokenCriteria(stop)]), pad_token_id=0
    )
    state = rnn.state(3)
    answer = rnn.generate(ids, state=state, **kwargs)
    expected = rnn.generate(ids, **kwargs)
    assert torch.equal(answer, expected)
    lengths = [next((i + 1 for i in range(14, len(row)) if row[i] == stop), len(row)) for row in expected.tolist()]
    assert state.seen.tolist() == lengths


@pytest.mark.parametrize("pad", [None, 3])
def test_columns_after_the_end_of_a_row_are_padding(model: PreTrainedModel, pad: int | None) -> None:
    rnn, ids = msrnn.MultiStateRNN(model, "tova", 9), tokens(2, 14)
    kwargs = greedy(stopping_criteria=StoppingCriteriaList([EndsAt(17, 22)]), pad_token_id=pad)
    answer = rnn.generate(ids, state=rnn.state(2), **kwargs)
    expected = rnn.generate(ids, **kwargs)
    assert torch.equal(answer[1], expected[1])
    assert answer[0].tolist() == [*expected[0, :17].tolist(), *[pad or 0] * (answer.shape[1] - 17)]


def test_the_result_has_no_cache_beside_the_state(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    out = rnn.generate(tokens(1, 12), state=rnn.state(), return_dict_in_generate=True, **greedy())
    assert out.past_key_values is None


@pytest.mark.parametrize("with_state", [False, True])
def test_prefill_chunks_of_transformers_change_nothing(model: PreTrainedModel, with_state: bool) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 8)
    ids, mask = left_padded(tokens(2, 9), [0, 4])
    states = [rnn.state(2) if with_state else None for _ in range(2)]
    whole = rnn.generate(ids, state=states[0], attention_mask=mask, **greedy())
    parts = rnn.generate(ids, state=states[1], attention_mask=mask, prefill_chunk_size=2, **greedy())
    assert torch.equal(parts, whole)


@pytest.mark.parametrize("eos", ["one", "several"])
def test_rows_are_padded_as_transformers_pads_them(eos: str) -> None:
    model = build(llama(eos_token_id=None))
    model.generation_config.pad_token_id = None  # then the stop token is the padding
    rnn, ids = msrnn.MultiStateRNN(model, "tova", 9), tokens(3, 14)
    plain = rnn.generate(ids, **greedy())
    stops = [int(plain[0, 16]), int(plain[1, 18])]
    kwargs = greedy(eos_token_id=stops if eos == "several" else stops[0])
    state = rnn.state(3)
    answer = rnn.generate(ids, state=state, **kwargs)
    assert torch.equal(answer, rnn.generate(ids, **kwargs))
    assert (answer[0, 17:] == stops[0]).all()
    assert state.seen.tolist()[0] == 17
