"""A judge on this machine: any model, unbounded, that answers greedily."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from msrnn.evaluate.judge.endpoint import ANSWER, Answer
from msrnn.evaluate.speaking import ends_of, prompted, say
from msrnn.policy import FULL
from msrnn.rnn import MultiStateRNN


class Local:
    def __init__(self, name: str, model: PreTrainedModel, tokenizer: Any) -> None:
        self.rnn, self.tokenizer, self.name = MultiStateRNN(model, FULL, None), tokenizer, name
        self.ends = ends_of(model, tokenizer)
        self.key = {"judge": name, "judge_fingerprint": self.rnn.plan.fingerprint["model"]}

    def ask(self, prompt: str, on_request: Callable[[], None]) -> Answer:
        on_request()
        ids = prompted(self.tokenizer, prompt, chat=bool(self.tokenizer.chat_template))
        (said,) = say(self.rnn, [ids], self.ends, ANSWER)
        told = {"prompt_tokens": len(ids), "completion_tokens": len(said)}
        return Answer(self.tokenizer.decode(said, skip_special_tokens=True), told)
