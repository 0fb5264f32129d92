"""The formats in which models write calls of tools. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msrnn.hf.model_options import AUTO


@dataclass(frozen=True)
class CallFormat:
    """How calls are written: JSON objects with the name of a function and its arguments, between markers.

    opening    before the first call
    lead       between the opening and the first object, besides white space
    separator  between two objects; empty: each call has an opening
    closing    after the last object; models sometimes leave it out
    bare       whether an answer may begin with an object, without the opening
    several    whether there may be more than one call
    key        the name of the arguments in an object
    begin, between, end   what a model writes around objects, to the letter
    """

    opening: str
    lead: str
    separator: str
    closing: str
    bare: bool
    several: bool
    key: str
    begin: str
    between: str
    end: str

    @property
    def markers(self) -> list[str]:
        """The texts that a tokenizer may have as tokens of their own."""
        return [marker for marker in (self.opening, self.closing) if len(marker) > 1]

    def find_tokens(self, tokenizer: Any) -> dict[str, int]:
        """The markers that are tokens of their own."""
        added = tokenizer.get_added_vocab()
        return {marker: added[marker] for marker in self.markers if marker in added}

    def list_text_tokens(self, tokenizer: Any) -> list[int]:
        """The other added tokens that are text, as those around a thought: not special, and no beginning of a call."""
        added = tokenizer.added_tokens_decoder.items()
        usual = [(number, token.content) for number, token in added if not token.special]
        return [number for number, text in usual if text not in self.markers and text.strip() and text[0] not in "{ \n"]


FORMATS = {
    "hermes": CallFormat(
        opening="<tool_call>",
        lead="",
        separator="",
        closing="</tool_call>",
        bare=False,
        several=True,
        key="arguments",
        begin="<tool_call>\n",
        between="\n</tool_call>\n<tool_call>\n",
        end="\n</tool_call>",
    ),
    "llama3_json": CallFormat(
        opening="<|python_tag|>",
        lead="",
        separator="",
        closing="",
        bare=True,
        several=False,
        key="parameters",
        begin="",
        between="",
        end="",
    ),
    "mistral": CallFormat(
        opening="[TOOL_CALLS]",
        lead="[",
        separator=",",
        closing="]",
        bare=False,
        several=True,
        key="arguments",
        begin="[TOOL_CALLS] [",
        between=", ",
        end="]",
    ),
}
PARSERS = (AUTO, *FORMATS)
