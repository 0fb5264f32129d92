"""What the model says, word by word and as plain text."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer


class Voice:
    """A streamer for `generate`: prints an answer while it is generated, and keeps its ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.ids: list[int] = []
        self._times: list[float] = []  # of the first and the newest token
        self._printer: Any = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

    def put(self, value: Tensor) -> None:
        if not self._printer.next_tokens_are_prompt:
            self.ids += value.flatten().tolist()
            self._times = [*self._times[:1], perf_counter()]
        self._printer.put(value)

    def end(self) -> None:
        self._printer.end()

    @property
    def speed(self) -> str:
        """Tokens, and tokens per second after the first."""
        count = len(self.ids)
        said = f"{count:,} token{'s' if count != 1 else ''}"
        if len(self._times) < 2:
            return said
        return f"{said}, {(count - 1) / max(self._times[1] - self._times[0], 1e-9):,.1f} tokens/s"

    def cut_at(self, max_new_tokens: int, model: PreTrainedModel) -> str:
        """That an answer had no room to end; empty where it did."""
        config: Any = model.generation_config
        eos = config.eos_token_id
        ends = eos if isinstance(eos, list) else [eos]
        if len(self.ids) < max_new_tokens or self.ids[-1] in ends:
            return ""
        return f"cut at --max-new-tokens {max_new_tokens}"
