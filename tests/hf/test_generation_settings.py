"""The settings of `generate`: which one counts, and what is refused before a token is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

import msrnn
from msrnn.hf.generation_settings import Settings
from tests.helpers.tiny import build, greedy, llama, tokens


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama(eos_token_id=None))


def test_an_argument_comes_before_a_config_and_a_config_before_the_models_own(model: PreTrainedModel) -> None:
    config = GenerationConfig(temperature=0.5, eos_token_id=7, num_beams=3)
    settings = Settings(model, {"generation_config": config, "temperature": 0.25, "eos_token_id": None})
    assert (settings["temperature"], settings["eos_token_id"], settings.beams) == (0.25, None, 3)
    assert (settings.pad_token, settings.sequences, settings.drafts) == (
        model.generation_config.pad_token_id or 0,
        1,
        False,
    )
    assert Settings(model, {"prompt_lookup_num_tokens": 3}).drafts


def test_forced_arguments_leave_the_callers_config_alone(model: PreTrainedModel) -> None:
    config = GenerationConfig(use_cache=False)
    given = {"generation_config": config, "use_cache": False, "attention_mask": 1}
    arguments = Settings(model, given).arguments(use_cache=True)
    assert arguments.keys() == {"generation_config"}
    assert (arguments["generation_config"].use_cache, config.use_cache) == (True, False)
    assert Settings(model, {"do_sample": True}).arguments(use_cache=True) == {"do_sample": True, "use_cache": True}


REFUSED_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "a misspelt one": ({"max_new_token": 5}, "max_new_token"),
    "images": ({"pixel_values": torch.zeros(1, 3, 4, 4)}, "pixel_values"),
    "positions": ({"position_ids": torch.zeros(1, 20)}, "position_ids: a state counts"),
    "embeddings": ({"inputs_embeds": torch.zeros(1, 20, 48)}, "inputs_embeds"),
    "a static cache": ({"cache_implementation": "static"}, "cache_implementation: the state is the cache"),
    "attentions": ({"output_attentions": True}, "output_attentions"),
    "a bad setting": ({"temperature": -1.0, "do_sample": True}, "temperature"),
}


@pytest.mark.parametrize("kind", REFUSED_ARGUMENTS)
def test_a_refused_call_has_read_nothing(model: PreTrainedModel, kind: str) -> None:
    arguments, reason = REFUSED_ARGUMENTS[kind]
    rnn, ids = msrnn.MultiStateRNN(model, "tova", 9), tokens(1, 20)
    state = rnn.state()
    with pytest.raises(ValueError, match=reason):
        rnn.generate(ids, state=state, **arguments)
    assert state.seen.tolist() == [0]
    rnn.generate(ids, state=state, **greedy())
    assert state.seen.tolist() == [30]
