"""A tokenizer for tests of texts."""

from __future__ import annotations

from typing import Any


class Letters:
    """A tokenizer of characters, which puts tokens of its own in front of a text and behind it."""

    def __init__(self, *opening: int, closing: tuple[int, ...] = ()) -> None:
        self.opening, self.closing = opening, closing

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, Any]:
        ids = [ord(letter) for letter in text]
        return {"input_ids": [*self.opening, *ids, *self.closing] if add_special_tokens else ids}
