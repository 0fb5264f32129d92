from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import FAMILIES, build, left_padded, llama, tokens
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)

import msrnn
from msrnn.ending import spoken


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama(eos_token_id=None))


def greedy(**more: Any) -> dict[str, Any]:
    return {"do_sample": False, "max_new_tokens": 10, **more}


def by_hand(rnn: msrnn.MultiStateRNN, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Greedy decoding by stepping: what generate must give."""
    state = rnn.state(len(ids))
    logits = rnn.read(ids, state, last_only=True)
    for _ in range(count):
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        logits = rnn.step(ids[:, -1:], state)
    return ids


@pytest.mark.parametrize("policy", ["tova", "h2o", "window+4"])
def test_generate_is_stepping(model: PreTrainedModel, policy: str) -> None:
    rnn = msrnn.MultiStateRNN(model, policy, 9)
    ids = tokens(2, 30)
    expected = by_hand(rnn, ids, 10)
    assert torch.equal(rnn.generate(ids, **greedy()), expected)
    stock = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=msrnn.MultiStateCache(model, policy, 9),
        **greedy(),
    )
    assert torch.equal(stock, expected)


def test_every_row_gets_what_it_gets_alone(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9, chunk=8)
    padding = [0, 5, 17]
    ids, mask = left_padded(tokens(3, 30), padding)
    logits = rnn.read(ids, rnn.state(3), mask)
    together = rnn.generate(ids, attention_mask=mask, **greedy())
    stock = model.generate(ids, attention_mask=mask, past_key_values=msrnn.MultiStateCache(model, size=9), **greedy())
    assert torch.equal(stock, together)
    for row, start in enumerate(padding):
        alone = ids[row : row + 1, start:]
        torch.testing.assert_close(logits[row, start:], rnn.read(alone, rnn.state())[0], atol=1e-5, rtol=1e-4)
        assert torch.equal(together[row, start:], rnn.generate(alone, **greedy())[0])


def test_last_only_is_the_last_of_all(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9, block=16)
    ids = tokens(2, 37)
    logits = rnn.read(ids, rnn.state(2))
    assert logits.shape == (2, 37, 97)
    last = rnn.read(ids, rnn.state(2), last_only=True)
    assert last.shape == (2, 1, 97)
    torch.testing.assert_close(last, logits[:, -1:])


def test_long_inputs_pass_in_blocks(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9, block=16)
    widths: list[int] = []
    told: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, inputs: widths.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    rnn.read(tokens(1, 40), rnn.state(), on_block=told.append)
    assert widths == told == [16, 16, 8]
    widths.clear()
    rnn.generate(tokens(1, 40), **greedy(max_new_tokens=2))
    hook.remove()
    assert widths == [16, 16, 7, 1, 1]


def test_a_state_goes_on_over_prompt_and_answer(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    first, second = tokens(2, 20), tokens(2, 7, seed=8)
    state = rnn.state(2)
    answer = rnn.generate(first, state=state, **greedy())
    assert torch.equal(answer, rnn.generate(first, **greedy()))
    assert state.seen.tolist() == [30, 30]
    again = rnn.generate(second, state=state, **greedy())
    whole = rnn.generate(torch.cat([answer, second], dim=1), **greedy())
    assert torch.equal(again, whole[:, answer.shape[1] :])
    assert state.seen.tolist() == [47, 47]


@pytest.mark.parametrize("own", [None, 1])
def test_a_row_that_ended_reads_no_padding(
    model: PreTrainedModel, own: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the end that the call names, whatever the model's own is."""
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    ids = tokens(2, 20)
    free = rnn.generate(ids, **greedy())[:, 20:]
    ends = int(free[0, 3])
    assert ends not in free[0, :3].tolist()
    assert ends not in free[1].tolist()
    state = rnn.state(2)
    monkeypatch.setattr(model.generation_config, "eos_token_id", own and int(free[own, 2]))
    rnn.generate(ids, state=state, **greedy(eos_token_id=ends, pad_token_id=0))
    assert state.seen.tolist() == [24, 30]
    alone = rnn.state()
    rnn.read(torch.cat([ids[:1], free[:1, :4]], dim=1), alone)
    assert sorted(state.positions(0)[0, 0].tolist()) == sorted(alone.positions(0)[0, 0].tolist())


@pytest.mark.parametrize(
    ("pad", "generated", "real"),
    [
        (2, [5, 2, 2, 2], [1, 1, 0, 0]),  # rows are filled up with the very token that ended them
        (0, [5, 2, 0, 0], [1, 1, 0, 0]),
        (0, [5, 6, 0, 0], [1, 1, 0, 0]),  # ended by something else than an eos
        (0, [5, 0, 6, 2], [1, 1, 1, 1]),
        (None, [5, 2, 2, 2], [1, 1, 0, 0]),
    ],
)
def test_what_was_said_ends_where_the_row_ended(pad: int | None, generated: list[int], real: list[int]) -> None:
    assert spoken(torch.tensor([generated]), [2, 3], pad).tolist() == [real]


def test_beams_equal_the_stock_generate(model: PreTrainedModel) -> None:
    ids = tokens(2, 20)
    ones = torch.ones_like(ids)
    beams = {"num_beams": 3, "num_return_sequences": 2, "do_sample": False, "max_new_tokens": 8}
    before = build(llama(eos_token_id=None)).generate(ids, attention_mask=ones, **beams)
    wide = msrnn.MultiStateRNN(model, "tova", 64)
    assert torch.equal(wide.generate(ids, **beams), before)
    narrow = msrnn.MultiStateRNN(model, "tova", 9)
    stock = model.generate(ids, attention_mask=ones, past_key_values=msrnn.MultiStateCache(model, size=9), **beams)
    assert torch.equal(narrow.generate(ids, **beams), stock)


def test_beams_advance_a_state_over_the_best(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    ids = tokens(1, 20)
    state = rnn.state()
    out = rnn.generate(ids, state=state, num_beams=3, do_sample=False, max_new_tokens=8)
    expected = rnn.state()
    rnn.read(out, expected)
    assert state.seen.tolist() == [28]
    assert torch.equal(state.positions(1).sort().values, expected.positions(1).sort().values)


def test_sampling_is_seeded_and_returns_several(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    ids = tokens(1, 20)
    outs = []
    for _ in range(2):
        torch.manual_seed(3)
        outs.append(rnn.generate(ids, do_sample=True, num_return_sequences=3, max_new_tokens=8))
    assert outs[0].shape == (3, 28)
    assert torch.equal(*outs)
    assert len({tuple(row.tolist()) for row in outs[0]}) > 1


def test_generate_takes_what_transformers_takes(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    ids = tokens(1, 20)

    def only_five(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([5]), 0.0)

    def after_three(sequences: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.full((len(sequences),), sequences.shape[1] >= 23)

    class Heard(TextStreamer):
        def __init__(self) -> None:
            self.heard: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.heard += value.flatten().tolist()

        def end(self) -> None:
            self.heard.append(-1)

    streamer = Heard()
    out = rnn.generate(
        ids,
        generation_config=GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=2, pad_token_id=0),
        logits_processor=LogitsProcessorList([only_five]),
        stopping_criteria=StoppingCriteriaList([after_three]),
        streamer=streamer,
        return_dict_in_generate=True,
        output_logits=True,
    )
    assert out.sequences[0, 20:].tolist() == [5, 5, 5]
    assert len(out.logits) == 3
    assert streamer.heard == [*out.sequences[0].tolist(), -1]


def test_a_prompt_of_one_token(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    ids = tokens(1, 1)
    assert torch.equal(rnn.generate(ids, **greedy()), by_hand(rnn, ids, 10))


def test_a_second_rnn_on_the_same_model_does_not_disturb_the_first(model: PreTrainedModel) -> None:
    ids = tokens(1, 30)
    first = msrnn.MultiStateRNN(model, "tova", 9)
    expected = first.read(ids, first.state())
    second = msrnn.MultiStateRNN(model, "window", 5)
    state = first.state()
    parts = []
    for t in range(0, 30, 10):
        parts.append(first.read(ids[:, t : t + 10], state))
        second.read(ids[:, t : t + 10], second.state())
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_reads_and_steps_alike(dtype: torch.dtype) -> None:
    rnn = msrnn.MultiStateRNN(build(llama()).to(dtype), "window+1", 9)
    ids = tokens(1, 20)
    read = rnn.read(ids, rnn.state())
    state = rnn.state()
    stepped = torch.cat([rnn.step(ids[:, t : t + 1], state) for t in range(20)], dim=1)
    assert read.dtype == dtype
    torch.testing.assert_close(stepped, read, atol=0.15, rtol=0.05)
    assert sorted(state.positions(0)[0, 0].tolist()) == [-1, 0, *range(12, 20)]


def test_a_model_in_training_mode_is_put_into_evaluation() -> None:
    model = build(llama(attention_dropout=0.9)).train()
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    ids = tokens(1, 20)
    assert torch.equal(rnn.read(ids, rnn.state()), rnn.read(ids, rnn.state()))


def read_with(ids: Any, mask: Any = None, rows: int = 1) -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), "tova", 9)
    rnn.read(ids, rnn.state(rows), mask)


@pytest.mark.parametrize(
    ("ids", "error", "named"),
    [
        ([[1, 2]], TypeError, "list"),
        (torch.ones(1, 3), TypeError, "float32"),
        (torch.ones(1, 3, dtype=torch.bool), TypeError, "bool"),
        (torch.ones(3, dtype=torch.long), ValueError, r"\[3\]"),
        (torch.ones(1, 0, dtype=torch.long), ValueError, r"\[1, 0\]"),
        (torch.ones(2, 3, dtype=torch.long), ValueError, "2 rows do not fit a state of 1"),
        (torch.tensor([[5, 97]]), ValueError, "97"),
        (torch.tensor([[-1, 5]]), ValueError, "-1"),
    ],
)
def test_bad_ids_are_named(ids: Any, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        read_with(ids)


def test_a_mask_must_cover_the_columns() -> None:
    with pytest.raises(ValueError, match=r"\[1, 4\]"):
        read_with(tokens(1, 3), torch.ones(1, 4))


def test_arguments_are_checked_before_any_work(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="chunk=0"):
        msrnn.MultiStateRNN(model, "tova", 9, chunk=0)
    with pytest.raises(ValueError, match="block=0"):
        msrnn.MultiStateRNN(model, "tova", 9, block=0)
    with pytest.raises(TypeError, match="Linear"):
        msrnn.MultiStateRNN(torch.nn.Linear(2, 2), "tova", 9)  # type: ignore[arg-type]
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    with pytest.raises(ValueError, match="batch_size=0"):
        rnn.state(0)
    with pytest.raises(ValueError, match="one token per row"):
        rnn.step(tokens(1, 2), rnn.state())
    for read in (rnn.read, rnn.step):
        with pytest.raises(TypeError, match="dict"):
            read(tokens(1, 1), {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="left"):
        rnn.generate(tokens(1, 3), attention_mask=torch.tensor([[1, 1, 0]]))
    with pytest.raises(ValueError, match="num_return_sequences=2"):
        rnn.generate(tokens(1, 3), state=rnn.state(), num_return_sequences=2, do_sample=True)


def test_assisted_decoding_is_refused(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    with pytest.raises(ValueError, match="assistant_model"):
        rnn.generate(tokens(1, 3), assistant_model=model)
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens"):
        rnn.generate(tokens(1, 3), prompt_lookup_num_tokens=3)


def test_a_batch_goes_on_with_padding_between_turns(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9, chunk=8)
    first, mask = left_padded(tokens(2, 20), [0, 6])
    second, more_mask = left_padded(tokens(2, 12, seed=7), [5, 0])
    state = rnn.state(2)
    rnn.generate(first, state=state, attention_mask=mask, **greedy())
    together = rnn.generate(second, state=state, attention_mask=more_mask, **greedy())
    for row, (a, b) in enumerate([(0, 5), (6, 0)]):
        alone = rnn.state()
        rnn.generate(first[row : row + 1, a:], state=alone, **greedy())
        assert torch.equal(together[row, b:], rnn.generate(second[row : row + 1, b:], state=alone, **greedy())[0])
        assert alone.seen[0] == state.seen[row]


def test_a_row_without_tokens_stays_as_it_is(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "h2o", 9)
    state = rnn.state(2)
    rnn.read(tokens(2, 15), state)
    before = state.positions(1)[1].sort().values
    mask = torch.tensor([[1] * 5, [0] * 5])
    rnn.read(tokens(2, 5), state, mask)
    rnn.read(tokens(2, 1), state, mask[:, :1])
    assert state.seen.tolist() == [21, 15]
    assert torch.equal(state.positions(1)[1].sort().values, before)


def test_learned_positions_end() -> None:
    rnn = msrnn.MultiStateRNN(build(FAMILIES["gpt2"]()), "tova", 8)
    known = rnn.model.config.n_positions
    state = rnn.state()
    rnn.read(tokens(1, known), state, last_only=True)
    with pytest.raises(ValueError, match=f"learned positions 0 to {known - 1:,}"):
        rnn.step(tokens(1, 1), state)


@pytest.mark.parametrize("backend", ["torch", "compiled"])
def test_the_default_dtype_does_not_matter(backend: str) -> None:
    model, ids = build(llama()), tokens(1, 30)
    for policy, positions in (("echo", "original"), ("h2o", "compressed")):
        rnn = msrnn.MultiStateRNN(model, policy, 8, backend=backend, positions=positions)
        expected = rnn.read(ids, rnn.state())
        torch.set_default_dtype(torch.bfloat16)
        try:
            found = rnn.read(ids, rnn.state())
        finally:
            torch.set_default_dtype(torch.float32)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


class Fourths(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return input_ids[:, -1] % 4 == 0


@pytest.mark.parametrize("pad", [0, 2])
def test_a_row_that_a_criterion_ended_reads_no_filling(model: PreTrainedModel, pad: int) -> None:
    """Rows are filled up with what may be an eos, and none of them said it."""
    rnn, ids = msrnn.MultiStateRNN(model, "tova", 9), tokens(3, 20)
    asked = greedy(eos_token_id=2, pad_token_id=pad, stopping_criteria=StoppingCriteriaList([Fourths()]))
    state = rnn.state(3)
    rnn.generate(ids, state=state, **asked)
    seen = []
    for row in ids:
        alone = rnn.state()
        rnn.generate(row[None], state=alone, **asked)
        seen += alone.seen.tolist()
    assert state.seen.tolist() == seen
    assert len(set(seen)) > 1
