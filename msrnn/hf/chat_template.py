"""Chat templates, one turn at a time: the bounded state holds the earlier turns, so only the new one is rendered."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from msrnn.errors import UsageError
from msrnn.hf.messages import Messages, encode_messages, has_special_tokens, locate_contents
from msrnn.hf.template_variables import find_variables

_ANSWER = "(an earlier answer)"
_EARLIER = [{"role": "user", "content": "(an earlier question)"}, {"role": "assistant", "content": _ANSWER}]

_OWN = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}


@dataclass(frozen=True)
class Rendering:
    """How a template renders messages.

    end        where the text ends: where a new "answer" begins; after the last message, as the template "closes" it; or
               in the last message, which stays "open" for more of it
    variables  of the template, besides the messages
    """

    end: Literal["answer", "closed", "open"] = "answer"
    variables: Mapping[str, Any] = field(default_factory=dict)


USUAL = Rendering()


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer without a chat template."""
    if not tokenizer.chat_template:
        raise UsageError("this model has no chat template: use an instruct model")


def with_template(tokenizer: PreTrainedTokenizerBase, template: str) -> PreTrainedTokenizerBase:
    """A copy of a tokenizer, with another chat template."""
    copy = deepcopy(tokenizer)
    copy.chat_template = template
    return copy


def opening(tokenizer: PreTrainedTokenizerBase, message: str, system: str | None = None) -> str:
    """The first turn of a conversation, up to where the answer begins."""
    return render(tokenizer, first_messages(message, system), prompt=True)


def first_messages(message: str, system: str | None = None) -> Messages:
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": message}]


def encode_first(tokenizer: PreTrainedTokenizerBase, messages: Messages, rendering: Rendering = USUAL) -> list[int]:
    """The tokens of a conversation up to where the answer begins. Contents are text, without special tokens."""
    others = list_tool_texts(messages, rendering.variables)
    return encode_messages(tokenizer, messages, lambda some: render_conversation(tokenizer, some, rendering), others)


def encode_following(tokenizer: PreTrainedTokenizerBase, message: str, rendering: Rendering = USUAL) -> list[int]:
    """The tokens of a later turn, as `following` writes it. The message is text, without special tokens."""
    later = [{"role": "user", "content": message}]
    return encode_messages(tokenizer, later, lambda some: following(tokenizer, some[0]["content"], rendering))


def count_system_tokens(
    messages: Messages, tokens: list[int], encode_again: Callable[[Messages], list[int]], tools: bool = False
) -> int:
    """How many of a conversation's tokens come before the first message that is not of the system.

    They are the tokens that stay the same when the text of that message changes. 0 if this message opens the
    conversation, and the template writes no `tools` before it.
    """
    roles = [message["role"] for message in messages]
    if roles[0] != "system" and not tools:
        return 0
    place = next((i for i, role in enumerate(roles) if role != "system"), None)
    if place is None:
        return len(tokens)
    return _count_tokens_before(place, messages, tokens, encode_again)


def count_open_tokens(messages: Messages, tokens: list[int], encode_again: Callable[[Messages], list[int]]) -> int:
    """How many of a conversation's tokens, at its end, are the content of the last message, which is open."""
    return len(tokens) - _count_tokens_before(len(messages) - 1, messages, tokens, encode_again)


def _count_tokens_before(
    place: int, messages: Messages, tokens: list[int], encode_again: Callable[[Messages], list[int]]
) -> int:
    """The tokens before the content of a message: those that stay the same when this content changes."""
    other = {**messages[place], "content": "1" if messages[place]["content"][:1] == "0" else "0"}
    again = encode_again([*messages[:place], other, *messages[place + 1 :]])
    pairs = zip(tokens, again, strict=False)
    return next((i for i, (one, two) in enumerate(pairs) if one != two), min(len(tokens), len(again)))


def closing(tokenizer: PreTrainedTokenizerBase, rendering: Rendering = USUAL) -> str:
    """The text after every answer, from its stop token on."""
    return _split_answer(render(tokenizer, _EARLIER, False, rendering.variables))[1]


def following(tokenizer: PreTrainedTokenizerBase, message: str, rendering: Rendering = USUAL) -> str:
    """A later turn, up to where the answer begins: what it adds after the `closing` of the turn before."""
    turns = [*_EARLIER, {"role": "user", "content": message}]
    both = render(tokenizer, turns, rendering.end == "answer", rendering.variables)
    return _split_answer(both)[1].removeprefix(closing(tokenizer, rendering))


def changes_beginning(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> bool:
    """Whether variables change what a template writes before an answer, which a later turn does not write again."""
    first, second = (_split_answer(render(tokenizer, _EARLIER, False, some))[0] for some in ({}, variables))
    return first != second


def _split_answer(text: str) -> tuple[str, str]:
    """The text before the earlier answer, and after it."""
    before, answer, after = text.partition(_ANSWER)
    if not answer:
        raise UsageError(
            "this model's chat template changes earlier answers, so turns cannot be rendered singly: use another model"
        )
    return before, after


def render_conversation(tokenizer: PreTrainedTokenizerBase, messages: Messages, rendering: Rendering) -> str:
    """Whole messages. Where the last one stays open, the text ends with its content.

    Raises a UsageError if it is to stay open and the template changes contents: its end is then not known.
    """
    if rendering.end != "open":
        return render(tokenizer, messages, rendering.end == "answer", rendering.variables)
    located = locate_contents(messages, lambda some: render(tokenizer, some, False, rendering.variables))
    if located is None:
        raise UsageError("this model's chat template changes messages, so the last one cannot be continued")
    return located._replace(rest="").text()


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, prompt: bool, variables: Mapping[str, Any] = USUAL.variables
) -> str:
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **variables)
    except Exception as error:  # a template is a program, whose errors have no common kind
        raise UsageError(f"this model's chat template refuses the conversation: {error}") from error
    return str(text)


def check_variables(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any], allow_special: bool) -> None:
    """Refuse variables that the chat template would ignore, those that it has already, and special tokens in values."""
    used, own = find_variables(tokenizer.get_chat_template()), _OWN | tokenizer.special_tokens_map.keys()
    for name, value in variables.items():
        if name in own:
            raise UsageError(f"variable {name!r}: chat templates have it already; leave it out")
        if name not in used:
            raise UsageError(f"variable {name!r:.100}: this model's chat template does not use it; leave it out")
        if not allow_special and any(has_special_tokens(tokenizer, text) for text in _list_texts(value)):
            raise UsageError(f"variable {name!r}: has the text of a special token; leave that text out")


def _list_texts(value: Any) -> Iterator[str]:
    """The strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _list_texts(part)


def list_tool_texts(messages: Messages, variables: Mapping[str, Any]) -> list[str]:
    """The texts of tools, and of calls in messages: those that a template writes besides contents."""
    calls = [message.get("tool_calls") for message in messages], [message.get("tool_call_id") for message in messages]
    return [*_list_texts([variables.get("tools"), *calls])]


def encode(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool) -> Tensor:
    """Token ids [1, T]. Special tokens belong at the start of a text, not where a text is continued."""
    encoded = tokenizer(text, add_special_tokens=add_special_tokens, return_tensors="pt")
    ids: Tensor = encoded["input_ids"]
    return ids.long()
