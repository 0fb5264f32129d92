"""Infill prompts: the text between a prompt and a `suffix`, for models that were trained on it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from msrnn.errors import UsageError
from msrnn.hf.chat_template import encode


class InfillForm(NamedTuple):
    """The tokens before the prompt, before the suffix, and before what is between them."""

    prompt: str
    suffix: str
    middle: str


_CODE_LLAMA = InfillForm("▁<PRE>", "▁<SUF>", "▁<MID>")
FORMS = (
    InfillForm("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    InfillForm("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    InfillForm("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillForm("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 DeepSeek-Coder
    _CODE_LLAMA,
)
_ENDS = (  # what models write after the middle, besides their own stop tokens
    "▁<EOT>",
    "<|endoftext|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<|file_separator|>",
    "<fim_pad>",
    "<reponame>",
    "<file_sep>",
    "<filename>",
    "<fim-pad>",
)
_SIGN = "☺"  # sentencepiece writes a space before a text that begins, and none after a sign


def find_form(tokenizer: Any) -> InfillForm:
    """The form of a tokenizer; raises a UsageError if it has none."""
    form = _find_form(tokenizer, len(tokenizer))
    if form is None:
        names = ", ".join(form.prompt for form in FORMS)
        raise UsageError(f"this model's tokenizer has no infill tokens ({names})", name="suffix", advice="leave it out")
    return form


@lru_cache(maxsize=8)
def _find_form(tokenizer: Any, size: int) -> InfillForm | None:
    """`size`: tokens may have been added since."""
    return next((form for form in FORMS if all(_id_of(tokenizer, name) is not None for name in form)), None)


def find_ends(tokenizer: Any) -> list[int]:
    """The tokens that end an infill."""
    found = (_id_of(tokenizer, name) for name in (*find_form(tokenizer), *_ENDS))
    return [token for token in found if token is not None]


def encode_infill(tokenizer: Any, prompt: str, suffix: str) -> list[int]:
    """The tokens after which a model writes what is between the two texts."""
    form = find_form(tokenizer)
    for name, text in (("prompt", prompt), ("suffix", suffix)):
        if used := [token for token in form if token in text]:
            advice = "leave it out, or write the whole prompt yourself, without suffix"
            raise UsageError(f"has the infill token {used[0]}, which would be read as such", name=name, advice=advice)
    before, between, after = (_id_of(tokenizer, token) for token in form)
    rest = _encode_rest(tokenizer, suffix) if form == _CODE_LLAMA else _encode(tokenizer, suffix)
    parts = [before, *_encode(tokenizer, prompt), between, *rest, after]
    opening: list[int] = encode(tokenizer, "", True)[0].tolist()
    return [*opening, *(token for token in parts if token is not None)]


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = encode(tokenizer, text, False)[0].tolist()
    return ids


def _encode_rest(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text without the space that sentencepiece puts before it."""
    sign = _encode(tokenizer, _SIGN)
    both = _encode(tokenizer, _SIGN + text)
    return both[len(sign) :] if both[: len(sign)] == sign else _encode(tokenizer, text)


def _id_of(tokenizer: Any, name: str) -> int | None:
    """The number of a token; None if the tokenizer does not have it, and would take another one for it."""
    token = tokenizer.convert_tokens_to_ids(name)
    return token if token is not None and tokenizer.convert_ids_to_tokens(token) == name else None
