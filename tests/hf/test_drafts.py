"""Assisted decoding: drafts are read into a bounded state, and answers are those without a draft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import msrnn
from msrnn.errors import UsageError
from tests.helpers.tiny import FAMILIES, build, greedy, hybrid, llama, tokens

OPTIONS: list[dict[str, Any]] = [
    {"policy": "tova", "size": 9},
    {"policy": "echo", "size": 9},
    {"policy": "h2o", "size": 16},
    {"policy": "window+4", "size": 12, "positions": "compressed"},
    {"policy": "echo", "size": 9, "state_dtype": "int8"},
    {"policy": "full", "size": None},
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama(eos_token_id=None))


def repetitive(length: int = 60) -> Tensor:
    """A prompt in which n-grams come back, so that some drafts are right."""
    return tokens(1, 12).repeat(1, -(-length // 12))[:, :length]


class Read:
    """How many tokens each forward pass of the model reads."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.widths: list[int] = []
        self.hook = model.get_input_embeddings().register_forward_pre_hook(self)

    def __call__(self, _: Any, inputs: tuple[Tensor, ...]) -> None:
        self.widths.append(inputs[0].shape[1])


@pytest.fixture
def read(model: PreTrainedModel) -> Any:
    found = Read(model)
    yield found
    found.hook.remove()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral-sliding"])
def test_prompt_lookup_changes_no_answer(options: dict[str, Any], family: str, device: str) -> None:
    config = FAMILIES[family]()
    config.eos_token_id = None
    rnn, ids, settings = (
        msrnn.MultiStateRNN(build(config, device), **options),
        repetitive().to(device),
        greedy(max_new_tokens=40),
    )
    plain = rnn.generate(ids, **settings)
    assert torch.equal(rnn.generate(ids, **settings, prompt_lookup_num_tokens=5), plain)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_state_is_the_same_afterwards(model: PreTrainedModel, options: dict[str, Any], read: Read) -> None:
    rnn = msrnn.MultiStateRNN(model, **options)
    one, other = rnn.state(), rnn.state()
    for state in (one, other):
        rnn.read(tokens(1, 30, seed=2), state)
    plain = rnn.generate(repetitive(), state=one, **greedy(max_new_tokens=40))
    read.widths.clear()
    assert torch.equal(
        rnn.generate(repetitive(), state=other, **greedy(max_new_tokens=40), prompt_lookup_num_tokens=4), plain
    )
    assert max(read.widths[1:]) > 1, "no draft was read"
    assert (one.seen.tolist(), one.columns, other.marked) == (other.seen.tolist(), other.columns, None)
    ids = tokens(1, 20, seed=3)
    torch.testing.assert_close(rnn.read(ids, one), rnn.read(ids, other), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_model_that_guesses_changes_no_answer(model: PreTrainedModel, seed: int) -> None:
    """With seed 0 the draft is the same model with all rows, so most of its guesses are right."""
    draft = build(llama(eos_token_id=None), seed=seed)
    rnn = msrnn.MultiStateRNN(model, "echo", 12)
    plain = rnn.generate(tokens(1, 40), **greedy(max_new_tokens=30))
    assert torch.equal(rnn.generate(tokens(1, 40), **greedy(max_new_tokens=30), assistant_model=draft), plain)


def test_sampling_with_a_draft_has_the_distribution_of_sampling(model: PreTrainedModel) -> None:
    """The first sampled token, which a draft proposes, against the model's own probabilities."""
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    draft = build(llama(eos_token_id=None), seed=1)
    ids = tokens(1, 20)
    settings: dict[str, Any] = {"do_sample": True, "top_k": 4, "max_new_tokens": 2}
    state = rnn.state()
    logits = rnn.read(ids, state, last_only=True)[0, -1]
    expected = torch.zeros(logits.shape[-1])
    best = logits.topk(4)
    expected[best.indices] = best.values.softmax(-1)
    torch.manual_seed(0)
    counts = torch.zeros_like(expected)
    for _ in range(120):
        out = rnn.generate(ids, **settings, assistant_model=draft)
        counts[out[0, 20]] += 1
    chi = ((counts - 120 * expected) ** 2 / (120 * expected))[expected > 0].sum()
    assert counts[expected == 0].sum() == 0
    assert chi < 21.1, "less than one in 10,000 of fair draws"  # chi-square of 3 degrees of freedom


def test_an_answer_ends_at_a_stop_token(model: PreTrainedModel) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9)
    plain = rnn.generate(repetitive(), **greedy(max_new_tokens=30))
    stop = int(plain[0, 75])
    one, other = rnn.state(), rnn.state()
    expected = rnn.generate(repetitive(), state=one, **greedy(max_new_tokens=30, eos_token_id=stop))
    found = rnn.generate(
        repetitive(), state=other, **greedy(max_new_tokens=30, eos_token_id=stop), prompt_lookup_num_tokens=6
    )
    assert torch.equal(found, expected)
    assert one.seen.tolist() == other.seen.tolist()


class Leaves:
    """A listener that leaves when it hears of accepted tokens for the n-th time, before the others are taken back."""

    def __init__(self, after: int) -> None:
        self.left = after

    def put(self, value: Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt

    def end(self) -> None: ...


@pytest.mark.parametrize("after", [1, 2, 3, 5, 9])
def test_an_interrupted_call_leaves_no_draft_in_the_state(model: PreTrainedModel, after: int) -> None:
    rnn = msrnn.MultiStateRNN(model, "echo", 9)
    settings = greedy(max_new_tokens=40)
    plain = rnn.generate(repetitive(), **settings)
    state = rnn.state()
    with pytest.raises(KeyboardInterrupt):
        rnn.generate(repetitive(), state=state, **settings, prompt_lookup_num_tokens=5, streamer=Leaves(after))
    seen = int(state.seen[0])
    assert seen >= 60
    assert state.marked is None
    straight = rnn.state()
    rnn.read(plain[:, :seen], straight)
    ids = tokens(1, 20, seed=3)
    torch.testing.assert_close(rnn.read(ids, state), rnn.read(ids, straight), atol=1e-4, rtol=1e-4)


def test_a_cache_of_ones_own(model: PreTrainedModel) -> None:
    """`model.generate` reads prompt and first draft in one pass; a cache keeps only its end for the way back."""
    for length in (40, 300):
        ids = repetitive(length)
        mask = torch.ones_like(ids)
        settings = {**greedy(max_new_tokens=30), "attention_mask": mask}
        with msrnn.MultiStateRNN(model, "echo", 12) as rnn:
            plain = model.generate(ids, past_key_values=rnn.cache(), **settings)
            cache = rnn.cache()
            assert torch.equal(
                model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=5, **settings), plain
            )
            straight = rnn.state()
            rnn.read(plain[:, :-1], straight)
            assert cache.state.seen.tolist() == straight.seen.tolist()
            new = tokens(1, 9, seed=4)
            torch.testing.assert_close(
                rnn.read(new, cache.state.fork(1)), rnn.read(new, straight), atol=1e-4, rtol=1e-4
            )


def test_a_cache_takes_back_the_end_of_one_pass(model: PreTrainedModel) -> None:
    with msrnn.MultiStateRNN(model, "tova", 9) as rnn, torch.no_grad():
        cache = rnn.cache()
        model(tokens(1, 20), past_key_values=cache)
        with pytest.raises(UsageError, match="activate_past_recording"):
            cache.crop(-1)
        cache.activate_past_recording()
        model(tokens(1, 300, seed=2), past_key_values=cache)
        with pytest.raises(UsageError, match="256 tokens were read since the mark"):
            cache.crop(-257)
        with pytest.raises(UsageError, match=r"crop\(-3\) takes back"):
            cache.crop(310)
        cache.crop(-256)
        cache.crop(0)
        straight = rnn.state()
        rnn.read(torch.cat([tokens(1, 20), tokens(1, 44, seed=2)], dim=1), straight)
        assert cache.get_seq_length() == 64
        new = tokens(1, 9, seed=4)
        torch.testing.assert_close(rnn.read(new, cache.state), rnn.read(new, straight), atol=1e-4, rtol=1e-4)


def test_what_cannot_be_drafted_is_refused_before_a_token_is_read(model: PreTrainedModel, read: Read) -> None:
    rnn = msrnn.MultiStateRNN(model, "tova", 9, recall=4)
    for more, words in (
        ({"prompt_lookup_num_tokens": 3}, "archive"),
        ({"assistant_early_exit": 1}, "assistant_early_exit"),
        ({"use_mtp": True}, "use_mtp"),
        ({"prompt_lookup_num_tokens": 3, "output_hidden_states": True}, "output_hidden_states"),
    ):
        with pytest.raises(UsageError, match=words):
            rnn.generate(tokens(1, 9), **more)
    with pytest.raises(UsageError, match="linear attention"):
        msrnn.MultiStateRNN(hybrid(), "tova", 9).generate(tokens(1, 9), prompt_lookup_num_tokens=3)
    with pytest.raises(ValueError, match="batch_size = 1"):
        msrnn.MultiStateRNN(model, "tova", 9).generate(tokens(2, 9), prompt_lookup_num_tokens=3)
    assert read.widths == []
