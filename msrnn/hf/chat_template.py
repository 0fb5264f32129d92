"""Chat templates, one turn at a time: a state holds the earlier turns, so only the new one is rendered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msrnn.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER = "(an earlier answer)"
_EARLIER = [{"role": "user", "content": "(an earlier question)"}, {"role": "assistant", "content": _ANSWER}]


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer without a chat template."""
    if not tokenizer.chat_template:
        raise UsageError("this model has no chat template: use an instruct model")


def opening(tokenizer: PreTrainedTokenizerBase, message: str, system: str | None = None) -> str:
    """The first turn of a conversation, up to where the answer begins."""
    head = [{"role": "system", "content": system}] if system else []
    return _render(tokenizer, [*head, {"role": "user", "content": message}], prompt=True)


def closing(tokenizer: PreTrainedTokenizerBase) -> str:
    """The text after every answer, from its stop token on."""
    return _after_answer(_render(tokenizer, _EARLIER, prompt=False))


def following(tokenizer: PreTrainedTokenizerBase, message: str) -> str:
    """A later turn, up to where the answer begins: what it adds after the `closing` of the turn before."""
    both = _render(tokenizer, [*_EARLIER, {"role": "user", "content": message}], prompt=True)
    return _after_answer(both).removeprefix(closing(tokenizer))


def _after_answer(text: str) -> str:
    _, answer, after = text.partition(_ANSWER)
    if not answer:
        raise UsageError(
            "this model's chat template changes earlier answers, so turns cannot be rendered singly: use another model"
        )
    return after


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], prompt: bool) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))
    except Exception as error:  # a template is a program, whose errors have no common kind
        raise UsageError(f"this model's chat template refuses the conversation: {error}") from error
