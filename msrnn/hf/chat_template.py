"""Chat templates, one turn at a time: a conversation that goes on for ever cannot be rendered from its start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msrnn.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER = "(an earlier answer)"
_EARLIER = [{"role": "user", "content": "(an earlier question)"}, {"role": "assistant", "content": _ANSWER}]


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.chat_template:
        raise UsageError("this model has no chat template: take an instruct model, or `msrnn generate` without --chat")


def opening(tokenizer: PreTrainedTokenizerBase, message: str, system: str | None = None) -> str:
    """The first turn of a conversation, up to where the answer begins."""
    head = [{"role": "system", "content": system}] if system else []
    return _render(tokenizer, [*head, {"role": "user", "content": message}], ask=True)


def closing(tokenizer: PreTrainedTokenizerBase) -> str:
    """What follows every answer, the token that ends it included."""
    return _after_answer(_render(tokenizer, _EARLIER, ask=False))


def following(tokenizer: PreTrainedTokenizerBase, message: str) -> str:
    """A later turn, up to where the answer begins: what it adds to an earlier one that is closed."""
    both = _render(tokenizer, [*_EARLIER, {"role": "user", "content": message}], ask=True)
    return _after_answer(both).removeprefix(closing(tokenizer))


def _after_answer(text: str) -> str:
    _, found, after = text.partition(_ANSWER)
    if not found:
        raise UsageError("this model's chat template changes what was said: use `msrnn generate` without --chat")
    return after


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], ask: bool) -> str:
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask))
    except TemplateError as error:
        raise UsageError(f"this model's chat template refuses such a conversation: {error}") from error
