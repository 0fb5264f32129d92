"""A judge on this machine: any model, unbounded, and which of the three answers is likeliest to it.

Small models say many things beside what they were asked; this way all of them answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from msrnn.evaluation.judge.endpoint import Answer
from msrnn.evaluation.judge.run import FINGERPRINT
from msrnn.evaluation.judge.verdict import LIKELIHOODS
from msrnn.evaluation.speaking import prompted
from msrnn.hf.rnn import MultiStateRNN
from msrnn.policy import FULL

OPTIONS = ("(A)", "(B)", "(C)")


class Local:
    """`on_long` hears of the first prompt that is longer than what the model was made for."""

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: Any,
        on_long: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.rnn, self.tokenizer, self.name = MultiStateRNN(model, FULL, None), tokenizer, name
        self.device, self.on_long = str(model.device), on_long
        self._known = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or math.inf
        self.key = {"judge": name, FINGERPRINT: self.rnn.spec.fingerprint["model"]}
        self.options = [list(tokenizer(option, add_special_tokens=False)["input_ids"]) for option in OPTIONS]

    def ask(self, prompt: str, on_request: Callable[[], None]) -> Answer:
        on_request()
        ids = prompted(self.tokenizer, prompt, chat=bool(self.tokenizer.chat_template))
        if len(ids) > self._known:
            self._known = math.inf
            self.on_long(len(ids))
        found = self._likelihoods(ids)
        told = {"prompt_tokens": len(ids), LIKELIHOODS: found}
        return Answer(OPTIONS[max(range(len(OPTIONS)), key=lambda i: found[i])], told)

    def _likelihoods(self, ids: list[int]) -> list[float]:
        """The logarithm of each option's probability, after the prompt."""
        state, found = self.rnn.state(1), []
        first = self.rnn.read(torch.tensor([ids]), state, last_only=True)
        for option in self.options:
            rest = [self.rnn.read(torch.tensor([option[:-1]]), state.fork(1))] if len(option) > 1 else []
            logs = torch.cat([first, *rest], dim=1)[0].float().log_softmax(-1)
            found.append(float(logs[torch.arange(len(option)), torch.tensor(option)].sum()))
        return found
