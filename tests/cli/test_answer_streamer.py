from __future__ import annotations

import pytest
import torch

from msrnn.cli.answer_streamer import AnswerStreamer
from tests.helpers.characters import END, character_model, character_tokenizer


def test_the_prompt_is_neither_printed_nor_counted(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, model = character_tokenizer(), character_model()
    streamer = AnswerStreamer(tokenizer)
    prompt, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("ask", "yes"))
    streamer.put(torch.tensor([prompt]))
    assert streamer.tokens_per_second is None
    for token in answer:
        streamer.put(torch.tensor([token]))
    assert streamer.is_cut(3, model)
    assert not streamer.is_cut(4, model)
    streamer.put(torch.tensor([END]))
    streamer.end()
    assert streamer.ids == [*answer, END]
    assert streamer.tokens_per_second is not None
    assert not streamer.is_cut(4, model), "the stop token ended it"
    assert capsys.readouterr().out == "yes\n"
