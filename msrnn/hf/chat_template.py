"""Chat templates, one turn at a time: the bounded state holds the earlier turns, so only the new one is rendered."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from msrnn.errors import UsageError
from msrnn.hf.messages import Messages, encode_messages

_ANSWER = "(an earlier answer)"
_EARLIER = [{"role": "user", "content": "(an earlier question)"}, {"role": "assistant", "content": _ANSWER}]


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer without a chat template."""
    if not tokenizer.chat_template:
        raise UsageError("this model has no chat template: use an instruct model")


def opening(tokenizer: PreTrainedTokenizerBase, message: str, system: str | None = None) -> str:
    """The first turn of a conversation, up to where the answer begins."""
    return render(tokenizer, first_messages(message, system), prompt=True)


def first_messages(message: str, system: str | None = None) -> Messages:
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": message}]


def encode_first(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    """The tokens of a conversation up to where the answer begins. Contents are text, without special tokens."""
    return encode_messages(tokenizer, messages, lambda some: render(tokenizer, some, prompt=True))


def encode_following(tokenizer: PreTrainedTokenizerBase, message: str) -> list[int]:
    """The tokens of a later turn, as `following` writes it. The message is text, without special tokens."""
    later = [{"role": "user", "content": message}]
    return encode_messages(tokenizer, later, lambda some: following(tokenizer, some[0]["content"]))


def count_system_tokens(messages: Messages, tokens: list[int], encode_again: Callable[[Messages], list[int]]) -> int:
    """How many of a conversation's tokens come before the first message that is not of the system; 0 if that opens it.

    They are the tokens that stay the same when the text of that message changes.
    """
    roles = [message["role"] for message in messages]
    if roles[0] != "system":
        return 0
    place = next((i for i, role in enumerate(roles) if role != "system"), None)
    if place is None:
        return len(tokens)
    other = {**messages[place], "content": "1" if messages[place]["content"][:1] == "0" else "0"}
    again = encode_again([*messages[:place], other, *messages[place + 1 :]])
    pairs = zip(tokens, again, strict=False)
    return next((i for i, (one, two) in enumerate(pairs) if one != two), min(len(tokens), len(again)))


def closing(tokenizer: PreTrainedTokenizerBase) -> str:
    """The text after every answer, from its stop token on."""
    return _after_answer(render(tokenizer, _EARLIER, prompt=False))


def following(tokenizer: PreTrainedTokenizerBase, message: str) -> str:
    """A later turn, up to where the answer begins: what it adds after the `closing` of the turn before."""
    both = render(tokenizer, [*_EARLIER, {"role": "user", "content": message}], prompt=True)
    return _after_answer(both).removeprefix(closing(tokenizer))


def _after_answer(text: str) -> str:
    _, answer, after = text.partition(_ANSWER)
    if not answer:
        raise UsageError(
            "this model's chat template changes earlier answers, so turns cannot be rendered singly: use another model"
        )
    return after


def render(tokenizer: PreTrainedTokenizerBase, messages: Messages, prompt: bool) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))
    except Exception as error:  # a template is a program, whose errors have no common kind
        raise UsageError(f"this model's chat template refuses the conversation: {error}") from error


def encode(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool) -> Tensor:
    """Token ids [1, T]. Special tokens belong at the start of a text, not where a text is continued."""
    encoded = tokenizer(text, add_special_tokens=add_special_tokens, return_tensors="pt")
    ids: Tensor = encoded["input_ids"]
    return ids.long()
