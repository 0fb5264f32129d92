"""Find calls of tools in the text of an answer, while it is generated.

The text is read character by character, so its division into pieces makes no difference. What may be a call is held
back until it is complete: then it is a call, or text like any other. So nothing is shown and taken back, or lost.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import Any, NamedTuple

from msrnn.server.call_formats import CallFormat

SPACE = " \t\n\r"
MOST_NESTED = 64  # objects and lists within each other
_KEYS = ("arguments", "parameters")
_MORE = {"id", "type"}  # which some models write
_OUTSIDE = frozenset(SPACE + ',:+-.0123456789{}[]"' + "truefalsnE")  # characters of JSON outside of strings


class Call(NamedTuple):
    """A call of a function, with its arguments as the model wrote them: the JSON text of an object."""

    name: str
    arguments: str


Found = str | Call


class CallParser:
    """Divides the text of one answer into content and calls.

    names  the functions that may be called; a call of another one is text
    most   calls, at most; what follows them is text
    """

    def __init__(self, form: CallFormat, names: Collection[str], most: int | None = None) -> None:
        self._form, self._names = form, names
        self._left = math.inf if form.several and most is None else 1 if most is None else most
        self._held: list[str] = []  # characters that are not out: white space, and what may be a call
        self._object: _ObjectScan | None = None
        self._read = self._read_start if form.bare else self._read_text
        self._matched = 0  # characters of the marker that the held text ends with
        self._called = False  # whether nothing but white space has followed a call
        self._found: list[Found] = []

    def put(self, text: str) -> list[Found]:
        """What is certain after this text."""
        for character in text:
            self._read(character)
        return self._take()

    def end(self) -> list[Found]:
        """What was held back."""
        if not (self._called and not "".join(self._held).strip(SPACE)):
            self._release()
        self._held = []
        return self._take()

    def _take(self) -> list[Found]:
        found, self._found = self._found, []
        return found

    def _release(self) -> None:
        """What is held is content."""
        if self._held:
            self._show("".join(self._held))
            self._held, self._called = [], False

    def _show(self, text: str) -> None:
        if self._found and isinstance(self._found[-1], str):
            self._found[-1] += text
        else:
            self._found.append(text)

    def _fail(self, character: str) -> None:
        """No call: what is held is content, and the character belongs to the text after it."""
        self._release()
        self._read, self._matched = self._read_text, 0
        self._read_text(character)

    def _read_start(self, character: str) -> None:
        """The beginning of an answer that may be an object."""
        if character == "{":
            self._begin_object()
        elif character in SPACE:
            self._held.append(character)
        else:
            self._resume_text([character])

    def _read_text(self, character: str) -> None:
        """Content, until an opening is complete. White space before an opening is not content."""
        opening = self._form.opening if self._left > 0 else ""
        if opening and character == opening[self._matched]:
            self._held.append(character)
            self._matched += 1
            if self._matched == len(opening):
                self._matched, self._read = 0, self._read_lead
            return
        if self._matched:  # no character of an opening but the first one begins another
            self._matched = 0
            self._release()
            self._read_text(character)
            return
        self._held.append(character)
        if character not in SPACE:
            self._release()

    def _read_lead(self, character: str) -> None:
        """What stands between an opening and an object."""
        lead = self._form.lead
        if character in SPACE:
            self._held.append(character)
        elif self._matched < len(lead) and character == lead[self._matched]:
            self._held.append(character)
            self._matched += 1
        elif self._matched == len(lead) and character == "{":
            self._begin_object()
        else:
            self._fail(character)

    def _begin_object(self) -> None:
        self._matched, self._read, self._object = 0, self._read_object, _ObjectScan()
        self._read_object("{")

    def _read_object(self, character: str) -> None:
        assert self._object is not None
        if not self._object.put(character):
            self._fail(character)
            return
        self._held.append(character)
        if self._object.depth:
            return
        call = parse_call("".join(self._object.text), self._names)
        if call is None:
            self._release()
            self._read = self._read_text
            return
        self._found.append(call)
        self._left -= 1
        self._held, self._called, self._read = [], True, self._read_after

    def _read_after(self, character: str) -> None:
        """What follows a call: another one, the closing, or text."""
        closing, separator = self._form.closing, self._form.separator
        if not self._matched and character in SPACE:
            self._held.append(character)
        elif not self._matched and separator and character == separator and self._left > 0:
            self._held.append(character)
            self._matched, self._read = len(self._form.lead), self._read_lead
        elif closing and character == closing[self._matched]:
            self._held.append(character)
            self._matched += 1
            if self._matched == len(closing):
                self._held = []
                self._resume_text([])
        else:
            held, self._held = self._held, []
            self._resume_text([*held, character])

    def _resume_text(self, characters: list[str]) -> None:
        """Continue with content; these characters may begin another call."""
        self._read, self._matched = self._read_text, 0
        held, self._held = self._held, []
        for character in [*held, *characters]:
            self._read(character)


class _ObjectScan:
    """Finds the end of a JSON object. What it finds need not be JSON."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.depth = 0
        self._in_string = self._escaped = False

    def put(self, character: str) -> bool:
        """Whether the text may go on with this character. The object is complete at depth 0."""
        self.text.append(character)
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = not self._escaped and character == "\\"
            return character >= " "  # JSON has no line breaks in strings: this one was not closed
        self._in_string = character == '"'
        self.depth += (character in "{[") - (character in "}]")
        return character in _OUTSIDE and self.depth <= MOST_NESTED


def parse_call(text: str, names: Collection[str]) -> Call | None:
    """The call that the text of an object is, if it calls one of these functions."""
    try:
        members = _split_members(text)
        name = json.loads(members.pop("name"))
    except (ValueError, LookupError, RecursionError):
        return None
    given = [members.pop(key) for key in _KEYS if key in members]
    if not isinstance(name, str) or name not in names or members.keys() - _MORE:
        return None
    return Call(name, given[0]) if len(given) == 1 and given[0].startswith("{") else None


def _split_members(text: str) -> dict[str, str]:
    """The members of an object as JSON texts. Raises a ValueError if it is not JSON."""
    decoder, members, at = json.JSONDecoder(parse_constant=_refuse_constant), dict[str, str](), 1
    while True:
        key, at = decoder.raw_decode(text, _skip_space(text, at))
        at = _skip_space(text, at)
        if not isinstance(key, str) or key in members or text[at] != ":":
            raise ValueError("no key, or one that is there twice")
        at = _skip_space(text, at + 1)
        _, stop = decoder.raw_decode(text, at)
        members[key], at = text[at:stop], _skip_space(text, stop)
        if text[at:] == "}":
            return members
        if text[at] != ",":
            raise ValueError("two members without a comma")
        at += 1


def _skip_space(text: str, at: int) -> int:
    while text[at] in SPACE:
        at += 1
    return at


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def read_calls(text: str, form: CallFormat, names: Collection[str], most: int | None = None) -> tuple[str, list[Call]]:
    """The content of a whole answer, and its calls."""
    parser = CallParser(form, names, most)
    found = [*parser.put(text), *parser.end()]
    content = "".join(one for one in found if isinstance(one, str))
    return content, [one for one in found if isinstance(one, Call)]
