"""The base of all bodies of requests: strict types, and text as JSON has it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, InstanceOf

# JSON can spell half of a character. A plain `str` would refuse it everywhere; here a field decides.
Text = InstanceOf[str]


class HalfCharacterError(ValueError):
    """A text with half of a character."""


def check_whole(text: str) -> str:
    """No tokenizer takes half of a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise HalfCharacterError(f"has half of a character (a lone surrogate) at {error.start}") from None
    return text


WholeText = Annotated[Text, AfterValidator(check_whole)]


def must(words: str) -> dict[str, Any]:
    """The condition on a field in words, where its type does not state it."""
    return {"x-must": words}


def leave_out_nulls(value: Any) -> Any:
    """Null counts as not given."""
    return {name: one for name, one in value.items() if one is not None} if isinstance(value, dict) else value


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
