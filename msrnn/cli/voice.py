"""What the model says, word by word and as plain text."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase, TextStreamer


class Voice:
    """A streamer for `generate`: prints an answer while it is made, and remembers its ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.ids: list[int] = []
        self._printer: Any = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

    def put(self, value: Tensor) -> None:
        if not self._printer.next_tokens_are_prompt:
            self.ids += value.flatten().tolist()
        self._printer.put(value)

    def end(self) -> None:
        self._printer.end()
