"""Text in, state files out: what can be checked before a model is loaded."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from msrnn.evaluate.texts import decoded

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


def read_text(source: str) -> str:
    """The text of a file, or of standard input for `-`."""
    data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    text = decoded(data, source)
    if not text.strip():
        raise ValueError(f"{source}: empty; give a text to read")
    return text


def encode(tokenizer: PreTrainedTokenizerBase, text: str, opening: bool) -> Tensor:
    """[1, T]. Special tokens that open a text are added only where one opens, not where it goes on."""
    encoded = tokenizer(text, add_special_tokens=opening, return_tensors="pt")
    ids: Tensor = encoded["input_ids"]
    return ids.long()


def check_target(path: Path | None, force: bool = False) -> None:
    """Whether a state can be saved there: better known before the reading than after it."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{path}: a folder; name a file to save to")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist; make it first")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{path}: the folder {path.parent} cannot be written to")
    if path.exists() and not force:
        raise ValueError(f"{path}: exists already; add --force to replace it, or name another file")


def as_utf8(text: str) -> str:
    """What was typed, with a replacement character for each byte that is no UTF-8: no tokenizer takes these."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
