"""Which tokens end an answer, where a checkpoint says it and where only its tokenizer knows them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import GenerationConfig

from msrnn.hf.loading import Loaded
from msrnn.hf.stop_tokens import complete_stop_tokens, stop_tokens_of
from tests.helpers.tiny import build, llama


def tokenizer_with(special: dict[int, str], ordinary: dict[int, str] | None = None) -> Any:
    added = {number: AddedToken(text, special=True) for number, text in special.items()}
    added |= {number: AddedToken(text, special=False) for number, text in (ordinary or {}).items()}
    return SimpleNamespace(added_tokens_decoder=added, eos_token_id=None)


@pytest.mark.parametrize(
    ("special", "own", "expected"),
    [
        ({5: "<|im_end|>", 6: "<|endoftext|>", 7: "<|im_start|>"}, 5, [5, 6]),
        ({5: "<|im_end|>", 6: "<|endoftext|>"}, [5], [5, 6]),
        ({5: "<|end|>", 6: "<|return|>", 7: "<|call|>"}, 6, [6, 7]),
        ({5: "<|end|>", 6: "<|endoftext|>"}, 6, [5, 6]),
        ({5: "<|eot_id|>"}, None, 5),
        ({5: "<pad>"}, 5, 5),
        ({5: "<pad>"}, None, None),
    ],
)
def test_a_checkpoint_without_settings_ends_at_all_ends_of_its_vocabulary(
    special: dict[int, str], own: Any, expected: Any
) -> None:
    model = build(llama())
    model.generation_config = GenerationConfig(eos_token_id=own, _from_model_config=True)
    complete_stop_tokens(model, tokenizer_with(special))
    found = sorted(stop_tokens_of(model))
    assert found == (expected if isinstance(expected, list) else [expected] if expected is not None else [])


def test_settings_of_a_checkpoint_are_its_own() -> None:
    model = build(llama())
    model.generation_config = GenerationConfig(eos_token_id=5)
    complete_stop_tokens(model, tokenizer_with({5: "<|im_end|>", 6: "<|endoftext|>"}))
    assert stop_tokens_of(model) == {5}


def test_ordinary_tokens_end_nothing() -> None:
    model = build(llama())
    model.generation_config = GenerationConfig(eos_token_id=5, _from_model_config=True)
    complete_stop_tokens(model, tokenizer_with({5: "<|im_end|>"}, {6: "<|endoftext|>"}))
    assert stop_tokens_of(model) == {5}


def test_the_small_model_ends_at_both_of_its_ends(small: Loaded) -> None:
    ends = {small.tokenizer.convert_tokens_to_ids(end) for end in ("<|im_end|>", "<|endoftext|>")}
    assert stop_tokens_of(small.model) == ends
    config: Any = small.model.generation_config
    assert not config._from_model_config, "transformers would make it again from the model's config"
