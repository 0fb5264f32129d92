"""Text in: what can be checked before a model is loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from msrnn.cli.saving import check_target as check_target
from msrnn.errors import UsageError
from msrnn.evaluation.data.texts import decoded

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


def read_text(source: str) -> str:
    """The text of a file, or of standard input for `-`."""
    data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    text = decoded(data, source)
    if not text.strip():
        raise UsageError(f"{source}: empty; give a text to read")
    return text


def encode(tokenizer: PreTrainedTokenizerBase, text: str, opening: bool) -> Tensor:
    """[1, T]. Special tokens that open a text are added only where one opens, not where it goes on."""
    encoded = tokenizer(text, add_special_tokens=opening, return_tensors="pt")
    ids: Tensor = encoded["input_ids"]
    return ids.long()


def as_utf8(text: str) -> str:
    """What was typed, with a replacement character for each byte that is no UTF-8: no tokenizer takes these."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
