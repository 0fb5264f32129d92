"""Messages as text: special tokens come from the chat template alone, never from the content of a message.

A template writes contents and special tokens into one text. To tell them apart, the contents are located in it, the
template's own special tokens are marked with a random prefix, and a copy of the tokenizer knows the marked ones only.
Everything else about the text and the tokenizer stays, so a content without special tokens gets the same ids as before.

Some tokenizers do not flag the tokens that open a turn as special. So an added token that the template writes counts as
special here, too.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cached_property, lru_cache
from string import whitespace
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase

from msrnn.errors import UsageError
from msrnn.hf.known_call import ANSWERED, TOOLS

Messages = list[dict[str, Any]]  # role and content, which are texts; of calls of tools, also more
Render = Callable[[Messages], str]
_ROLES = (  # what a template writes for each role; those that it refuses show nothing
    ("system", "user", "assistant", "user"),
    ("user", "assistant", "user"),
    ("user", "assistant", "tool"),
)
_NOT_AS_TEXT = "a message has the text of a special token, which this tokenizer cannot read as text: leave it out"


class Located(NamedTuple):
    """A rendered text in parts: what the template writes before each content, the contents, and the rest."""

    around: list[str]
    contents: list[str]
    rest: str

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Where the contents are in the text, in characters."""
        found, at = [], 0
        for before, content in zip(self.around, self.contents, strict=True):
            at += len(before)
            found.append((at, at + len(content)))
            at += len(content)
        return found

    def text(self, change: Callable[[str], str] = lambda part: part) -> str:
        """The whole text; `change` is applied to what the template writes."""
        pairs = zip(self.around, self.contents, strict=True)
        return "".join(change(before) + content for before, content in pairs) + change(self.rest)


def locate_contents(messages: Messages, render: Render) -> Located | None:
    """Find the contents in the rendered messages; None if the template changes them.

    The template is rendered with other contents, which show what it puts around them: a content may also occur there.
    """
    return _locate(messages, _render_marks(messages, render), render(messages))


def _marks(messages: Messages) -> list[str]:
    """A mark for each content. A message of calls alone has none: templates write nothing for it."""
    numbers = range(len(messages))
    return [f"\ue000{i}\ue001" if messages[i]["content"] or "tool_calls" not in messages[i] else "" for i in numbers]


def _render_marks(messages: Messages, render: Render) -> str:
    """The rendered messages with marks for contents: everything else in it is the template's."""
    pairs = zip(messages, _marks(messages), strict=True)
    return render([{**message, "content": mark} for message, mark in pairs])


def _locate(messages: Messages, rest: str, actual: str) -> Located | None:
    around = []
    for mark in _marks(messages):
        if not mark:
            around.append("")
            continue
        before, found, rest = rest.partition(mark)
        if not found:
            return None
        around.append(before)
    for write in _WAYS:
        located = Located(around, [*map(write, messages)], rest)
        if located.text() == actual:
            return located
    return None


def _escape_result(message: dict[str, Any]) -> str:
    """The content of a message, that of a tool as the text of a JSON string, as some templates write it."""
    content: str = message["content"]
    return json.dumps(content, ensure_ascii=False)[1:-1] if message["role"] == "tool" else content


_WAYS: tuple[Callable[[dict[str, Any]], str], ...] = (  # in which templates write contents
    lambda message: str(message["content"]),
    lambda message: str(message["content"]).strip(),
    _escape_result,
    lambda message: _escape_result(message) if message["role"] == "tool" else str(message["content"]).strip(),
)


def encode_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, render: Render, others: Iterable[str] = ()
) -> list[int]:
    """The token ids of rendered messages, whose contents are text: none of them becomes a special token.

    `others` are texts that the template writes besides contents. Raises a UsageError if one of them has the text of a
    special token, or if the template changes contents, and writes the text of a special token of one.
    """
    marked, actual = _render_marks(messages, render), render(messages)
    specials, located = _Specials.of(tokenizer, marked), _locate(messages, marked, actual)
    if any(specials.occur_in(text) or specials.may_complete(text) for text in others):
        raise UsageError("a tool, or a call of one, has the text of a special token: leave that text out")
    if located is None:
        if specials.find_in(actual) != specials.find_in(marked):
            raise UsageError(
                "a message has the text of a special token, and this model's chat template changes messages, so that "
                "the two cannot be told apart: leave that text out"
            )
        return _plain(tokenizer, actual)
    if specials.all_of_template(located):
        return _plain(tokenizer, located.text())
    return specials.encode(located)


def has_special_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Whether a text has that of a special token, also after the tokenizer has normalized it."""
    return _Specials.of(tokenizer, "").occur_in(text)


def _plain(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


class _Specials:
    """The special tokens of a tokenizer; `written` are added tokens that count as such."""

    def __init__(self, tokenizer: Any, written: frozenset[str]) -> None:
        added = ((token.content, (number, token)) for number, token in tokenizer.added_tokens_decoder.items())
        self._tokens = {text: found for text, found in added if found[1].special or text in written}
        self.names = sorted(self._tokens, key=len, reverse=True)  # as tokenizers do: the longest that fits
        self._pattern = re.compile("|".join(map(re.escape, self.names)) or r"(?!)")
        long = [name for name in self.names if len(name) > 2]
        self._beginnings, self._ends = tuple(name[:-1] for name in long), tuple(name[1:] for name in long)
        self._middles = {name[1:-1] for name in long if not name[1:-1].isidentifier()}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._normalizer = backend.normalizer if backend is not None else None
        self._backend, self._mark = backend, f"\ue000{secrets.token_hex(16)}"

    @cached_property
    def _copy(self) -> tuple[Tokenizer, dict[int, int]]:
        """A tokenizer that knows special tokens only where they are marked, and the ids that it should have for them.

        It takes special tokens for text, so the marked ones are not special for it, and the others all are.
        """
        if not isinstance(self._backend, Tokenizer):
            raise UsageError(_NOT_AS_TEXT)
        description = json.loads(self._backend.to_str())
        for token in description["added_tokens"]:
            token["special"] |= token["content"] in self._tokens
        copy = Tokenizer.from_str(json.dumps(description))
        copy.no_truncation()
        copy.no_padding()
        copy.encode_special_tokens = True
        copy.add_tokens([self._add_mark(token) for _, token in self._tokens.values()])
        marked: dict[str, int] = copy.get_vocab()
        return copy, {marked[self._mark + name]: number for name, (number, _) in self._tokens.items()}

    @staticmethod
    def of(tokenizer: Any, template_text: str) -> _Specials:
        """Those of a tokenizer whose chat template has written this text."""
        size = len(tokenizer)
        written = _find_role_markers(tokenizer, size, str(tokenizer.chat_template))
        here = {marker for marker in _markers(tokenizer, size) if marker in template_text}
        return _specials_of(tokenizer, size, written | here)

    def _add_mark(self, token: AddedToken) -> AddedToken:
        flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        return AddedToken(self._mark + token.content, special=False, **flags)

    def occur_in(self, content: str) -> bool:
        """Whether a content has the text of a special token, also after the tokenizer has normalized it."""
        if self._pattern.search(content):
            return True
        return self._normalizer is not None and bool(self._pattern.search(self._normalizer.normalize_str(content)))

    def may_complete(self, text: str) -> bool:
        """Whether a sign before or after a text makes it that of a special token: some templates write keys so."""
        return text.endswith(self._beginnings) or text.startswith(self._ends) or text in self._middles

    def find_in(self, text: str) -> list[list[str]]:
        """The special tokens that a text has, as it is and after the tokenizer has normalized it."""
        texts = [text] if self._normalizer is None else [text, self._normalizer.normalize_str(text)]
        return [self._pattern.findall(one) for one in texts]

    def all_of_template(self, located: Located) -> bool:
        """Whether all special tokens of a text are the template's: none is in a content, or begins or ends in one."""
        if self._normalizer is not None and any(map(self.occur_in, located.contents)):
            return False
        expected, at = [], 0
        for before, content in zip([*located.around, located.rest], [*located.contents, ""], strict=True):
            expected += [(at + found.start(), at + found.end()) for found in self._pattern.finditer(before)]
            at += len(before) + len(content)
        return expected == [found.span() for found in self._pattern.finditer(located.text())]

    def encode(self, located: Located) -> list[int]:
        """The tokens of a text whose contents have no special ones."""
        copy, known = self._copy
        text = located.text(lambda part: self._pattern.sub(lambda found: self._mark + found[0], part))
        ids = copy.encode(text, add_special_tokens=False).ids
        if {*known.values()} & {*ids}:  # its model has them in its vocabulary, and makes them of text
            raise UsageError(_NOT_AS_TEXT)
        return [known.get(token, token) for token in ids]


@lru_cache(maxsize=8)
def _specials_of(tokenizer: Any, size: int, written: frozenset[str]) -> _Specials:
    """`size`: tokens may have been added since."""
    return _Specials(tokenizer, written)


@lru_cache(maxsize=8)
def _find_role_markers(tokenizer: Any, size: int, template: str) -> frozenset[str]:
    """The added tokens that the chat template writes around messages of any role, and around calls of tools."""
    written: set[str] = set()
    ways: list[tuple[Messages, Any]] = [([{"role": role, "content": "a"} for role in some], None) for some in _ROLES]
    for messages, tools in [*ways, (ANSWERED, TOOLS)]:
        with suppress(Exception):  # a template is a program, whose errors have no common kind
            text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
            written |= {marker for marker in _markers(tokenizer, size) if marker in str(text)}
    return frozenset(written)


@lru_cache(maxsize=8)
def _markers(tokenizer: Any, size: int) -> list[str]:
    """The added tokens that are not flagged as special, and not ordinary text: spaces, a word or a single sign."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if not token.special]
    bare = [token.strip("▁" + whitespace) for token in added]
    return [token for token, sign in zip(added, bare, strict=True) if len(sign) > 1 and not sign.isalnum()]
