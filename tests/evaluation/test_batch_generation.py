"""A prompt's continuation does not depend on the other prompts of its batch, or on a shared prefix."""

from __future__ import annotations

import pytest
import torch
from characters import character_tokenizer
from tiny import build, llama, tokens
from transformers import PreTrainedModel

from msrnn.evaluation.batch_generation import PrefixGroup, generate_batch, prefix_groups
from msrnn.hf.generation import stop_tokens_of
from msrnn.hf.rnn import MultiStateRNN

TOKENIZER = character_tokenizer()
DOCUMENT, OTHER = tokens(1, 40)[0].tolist(), tokens(1, 33, seed=2)[0].tolist()
PROMPTS = [[*DOCUMENT, 5, 6, 7], [*OTHER, 5], [*DOCUMENT, 8], [9, 10], [*DOCUMENT[:30], 8, 8, 8], [*OTHER, 5]]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama(vocab_size=len(TOKENIZER)))


def test_prompts_that_begin_alike() -> None:
    found = {tuple(sorted(group.rows)): group.shared for group in prefix_groups(PROMPTS)}
    assert found == {(0, 2, 4): 30, (1, 5): 33, (3,): 1}
    assert prefix_groups([[1], [1]]) == [PrefixGroup([0, 1], 0)]
    assert prefix_groups([[1, 2, 3, 4]]) == [PrefixGroup([0], 3)]
    assert prefix_groups([[1, 2, 3, 4], [1, 2, 3, 4, 5]]) == [PrefixGroup([0, 1], 3)]
    assert prefix_groups([[1, 2, 3, 4], [1, 9, 9, 9]]) == [PrefixGroup([0], 3), PrefixGroup([1], 3)]


@pytest.mark.parametrize(("policy", "size"), [("full", None), ("tova", 16), ("echo", 11), ("h2o", 8), ("window+4", 64)])
def test_beside_others_as_alone(model: PreTrainedModel, policy: str, size: int | None) -> None:
    rnn = MultiStateRNN(model, policy, size)
    together = generate_batch(rnn, PROMPTS, set(), 8)
    assert together == [generate_batch(rnn, [prompt], set(), 8)[0] for prompt in PROMPTS]
    for prompt, answer in zip(PROMPTS, together, strict=True):
        logits = rnn.read(torch.tensor([prompt + answer[:-1]]), rnn.state())
        assert answer == logits[0, len(prompt) - 1 :].argmax(-1).tolist()


def test_what_is_shared_is_read_once(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = list[list[int]]()
    read = MultiStateRNN.read

    def noted(self: MultiStateRNN, ids: torch.Tensor, *arguments: object, **named: object) -> torch.Tensor:
        shapes.append(list(ids.shape))
        return read(self, ids, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(MultiStateRNN, "read", noted)
    generate_batch(MultiStateRNN(model, "tova", 16), PROMPTS, set(), 2)
    assert shapes == [[3, 33], [6, 13]]


@pytest.mark.parametrize("prompts", [PROMPTS, [[4], [5]], [[7]]])
def test_all_tokens_are_counted(model: PreTrainedModel, prompts: list[list[int]]) -> None:
    counted = list[int]()
    generate_batch(MultiStateRNN(model, "tova", 16, block=8), prompts, set(), 5, on_tokens=counted.append)
    assert sum(counted) == sum(len(prompt) + 5 for prompt in prompts)


def test_an_answer_ends_where_the_model_ends_it(model: PreTrainedModel) -> None:
    """And the others go on, in a smaller batch once half of them have ended."""
    rnn = MultiStateRNN(model, "tova", 16)
    whole = generate_batch(rnn, PROMPTS, set(), 12)
    assert [len(row) for row in whole] == [12] * len(PROMPTS)
    for end in {token for row in whole for token in row}:
        cut = generate_batch(rnn, PROMPTS, {end}, 12)
        assert cut == [row[: row.index(end)] if end in row else row for row in whole]
    assert stop_tokens_of(model, TOKENIZER) == {TOKENIZER.eos_token_id}
