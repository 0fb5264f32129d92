"""Prompts and messages of a request, made into tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from msrnn.checks import is_whole
from msrnn.engine.detokenizer import Detokenizer
from msrnn.engine.session_files import Session
from msrnn.errors import UsageError
from msrnn.hf.chat_template import (
    USUAL,
    Rendering,
    check_template,
    closing,
    count_open_tokens,
    count_system_tokens,
    encode,
    encode_first,
    encode_following,
    following,
    render_conversation,
)
from msrnn.hf.messages import Messages
from msrnn.hf.tool_template import encode_results, follow_call
from msrnn.server.errors import ApiError, bad_value
from msrnn.server.infill import encode_infill
from msrnn.server.message_models import Message
from msrnn.server.request_models import CompletionRequest
from msrnn.server.token_texts import fewest_tokens
from msrnn.server.tool_messages import show_message


class Prompt(NamedTuple):
    tokens: list[int]
    text: str | None  # as it was sent; None if tokens were sent


class Echo(NamedTuple):
    """A prompt that is sent back."""

    text: str
    offsets: list[int]  # where each token begins in it


def check_answers(fields: Any, most: int) -> None:
    """Refuse more answers than `most`, before any prompt is tokenized."""
    prompts, n = (fields.get("prompt"), fields.get("n")) if isinstance(fields, dict) else (None, None)
    many = len(prompts) if isinstance(prompts, list) and prompts and type(prompts[0]) is not int else 1
    answers = many * (n if is_whole(n) else 1)
    if answers > most:
        param = "prompt" if many > 1 else "n"
        raise bad_value(param, f"{answers:,} answers to {many:,} prompts: this server takes {most:,} at most")


def read_prompts(request: CompletionRequest, tokenizer: Any, begins: bool, most_tokens: int) -> list[Prompt]:
    """The tokens of each prompt. A text that begins gets the tokenizer's special tokens."""
    prompts = []
    for prompt in request.prompts:
        if request.suffix:
            prompts.append(_read_infill(prompt, request.suffix, tokenizer, most_tokens))
        elif isinstance(prompt, str):
            check_fits(prompt, tokenizer, most_tokens)
            prompts.append(Prompt(encode(tokenizer, prompt, begins)[0].tolist(), prompt))
        else:
            prompts.append(Prompt(prompt, None))
    if not all(prompt.tokens for prompt in prompts):
        raise bad_value("prompt", "prompt is empty: give one token or more")
    return prompts


def _read_infill(prompt: Any, suffix: str, tokenizer: Any, most_tokens: int) -> Prompt:
    if not isinstance(prompt, str):
        raise bad_value("suffix", "suffix needs a prompt of text, and this one is token ids: send its text")
    check_fits(prompt + suffix, tokenizer, most_tokens)
    try:
        return Prompt(encode_infill(tokenizer, prompt, suffix), prompt)
    except UsageError as error:
        raise bad_value(error.name or "suffix", str(error)) from error


def echo_of(prompt: Prompt, tokenizer: Any) -> Echo:
    """A text as it was sent, or the text of tokens without special ones."""
    decoder = Detokenizer(tokenizer, skip_special=prompt.text is None)
    pieces = [*map(decoder.put, prompt.tokens)]
    pieces[-1] += decoder.end()
    text, begins = "".join(pieces), [0, *accumulate(map(len, pieces))]
    if prompt.text is None:
        return Echo(text, begins[:-1])
    # Special tokens that open a text are not a part of it; a tokenizer may change a text, too.
    extra = len(text) - len(prompt.text) if text.endswith(prompt.text) else 0
    return Echo(prompt.text, [min(max(0, begin - extra), len(prompt.text)) for begin in begins[:-1]])


def read_messages(messages: Sequence[Message]) -> Messages:
    """The messages as chat templates take them."""
    names: dict[str, str] = {}
    return [show_message(message, names) for message in messages]


def check_fits(text: str, tokenizer: Any, most_tokens: int, param: str = "max_tokens") -> None:
    """Refuse a text that has too many tokens for certain, before it is tokenized."""
    if fewest_tokens(tokenizer, text) > most_tokens:
        raise too_long_error(f"{len(text):,} characters", most_tokens, param)


def too_long_error(length: str, most_tokens: int, param: str) -> ApiError:
    message = f"{length} are more than {most_tokens:,} tokens, prompt and answer together: send a shorter text"
    return ApiError(400, message, param=param, code="context_length_exceeded")


class Chat(NamedTuple):
    """Messages of a conversation, as far as they are rendered; of a session that exists, what is new of them."""

    tokenizer: Any
    messages: Messages
    session: Session | None
    allow_special: bool  # contents may have special tokens
    rendering: Rendering = USUAL

    def text(self, messages: Messages) -> str:
        """The messages as the chat template renders them after an answer of an existing session."""
        if self.session is None:
            return render_conversation(self.tokenizer, messages, self.rendering)
        if self._is_result:
            later = follow_call(self.tokenizer, messages, self.rendering)
        else:
            later = following(self.tokenizer, messages[0]["content"], self.rendering)
        return closing(self.tokenizer, self.rendering) + later

    def tokens(self, most_tokens: int, param: str = "max_tokens") -> list[int]:
        check_template(self.tokenizer)
        roles = [message["role"] for message in self.messages]
        if self.session is not None and roles != ["user"] and {*roles} != {"tool"}:
            raise UsageError("a session that has begun continues with one message of the user, or results of its calls")
        check_fits(self.text(self.messages), self.tokenizer, most_tokens, param)
        if self.session is None:
            return self._first_tokens()
        end: list[int] = encode(self.tokenizer, closing(self.tokenizer, self.rendering), False)[0].tolist()
        return [*(end[1:] if end[:1] == [self.session.last] else end), *self._following_tokens()]

    def count_system_tokens(self, tokens: list[int]) -> int:
        """How many of the tokens are of the system message; 0 in a session that has begun."""
        if self.session is not None:
            return 0
        tools = bool(self.rendering.variables.get("tools"))
        again = lambda other: self._replace(messages=other)._first_tokens()  # noqa: E731
        return count_system_tokens(self.messages, tokens, again, tools)

    def count_open_tokens(self, tokens: list[int]) -> int:
        """How many of the tokens are those of the last message, if it is continued."""
        if self.rendering.end != "open":
            return 0
        count = count_open_tokens(self.messages, tokens, lambda other: self._replace(messages=other)._first_tokens())
        return min(count, len(tokens) - 1)  # a template may write nothing but contents

    def _first_tokens(self) -> list[int]:
        if self.allow_special:
            return encode(self.tokenizer, self.text(self.messages), False)[0].tolist()
        return encode_first(self.tokenizer, self.messages, self.rendering)

    @property
    def _is_result(self) -> bool:
        return bool(self.messages[0]["role"] == "tool")

    def _following_tokens(self) -> list[int]:
        if self._is_result:
            if self.allow_special:
                text = follow_call(self.tokenizer, self.messages, self.rendering)
                return encode(self.tokenizer, text, False)[0].tolist()
            return encode_results(self.tokenizer, self.messages, self.rendering)
        content = self.messages[0]["content"]
        if self.allow_special:
            return encode(self.tokenizer, following(self.tokenizer, content, self.rendering), False)[0].tolist()
        return encode_following(self.tokenizer, content, self.rendering)
