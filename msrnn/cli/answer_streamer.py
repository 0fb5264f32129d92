"""Print an answer while it is generated."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from msrnn.hf.stop_tokens import stop_tokens_of


class AnswerStreamer:
    """A streamer for `generate`: prints the new tokens as text, and records their ids and the time they took."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.ids: list[int] = []
        self._first_time = self._last_time = 0.0
        self._printer: Any = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

    def put(self, value: Tensor) -> None:
        if not self._printer.next_tokens_are_prompt:
            self._last_time = perf_counter()
            self._first_time = self._first_time if self.ids else self._last_time
            self.ids += value.flatten().tolist()
        self._printer.put(value)

    def end(self) -> None:
        self._printer.end()

    @property
    def tokens_per_second(self) -> float | None:
        """The decoding speed after the first token; None for fewer than two tokens."""
        if len(self.ids) < 2:
            return None
        return (len(self.ids) - 1) / max(self._last_time - self._first_time, 1e-9)

    def is_cut(self, max_new_tokens: int, model: PreTrainedModel) -> bool:
        """Whether the answer reached its token limit before a stop token."""
        return len(self.ids) >= max_new_tokens and self.ids[-1] not in stop_tokens_of(model)
