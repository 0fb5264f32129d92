"""The text of an answer as it grows: whole characters, and stop strings that no part of is ever shown."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrnn.engine.detokenizer import CONTEXT, Detokenizer, StopString, TextStream, list_special_tokens
from tests.helpers.tool_templates import tool_tokenizer


class Bytes:
    """A tokenizer whose tokens are bytes, so that characters come in parts."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(ids).decode("utf-8", errors="replace")


def streamed(text: str, stops: list[str], tokenizer: Any = None) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer or Bytes(), stops)
    parts = []
    for token in text.encode():
        parts.append(stream.put(token))
        if stream.stopped:
            break
    return [*parts, stream.end()], stream


@given(st.text(alphabet=st.characters(exclude_characters="\N{REPLACEMENT CHARACTER}", codec="utf-8"), max_size=30))
def test_parts_make_the_whole(text: str) -> None:
    parts, stream = streamed(text, [])
    assert "".join(parts) == text
    assert stream.stopped is None
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


@given(st.text(alphabet="ab", max_size=30), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
def test_nothing_of_a_stop_string_is_shown(text: str, stops: list[str]) -> None:
    """Every prefix of what was shown is a prefix of what will be shown; it ends where the first stop string begins."""
    parts, stream = streamed(text, stops)
    ends = [next((n for n in range(len(text) + 1) if text[:n].endswith(stop)), None) for stop in stops]
    first = min((end for end in ends if end is not None), default=None)
    if first is None:
        assert "".join(parts) == text
        assert stream.stopped is None
    else:
        found = [stop for stop in stops if text[:first].endswith(stop)]
        assert stream.stopped in found
        assert "".join(parts) == text[: first - max(map(len, found))]


def test_a_character_that_is_never_completed_is_shown_at_the_end() -> None:
    stream = TextStream(Bytes())
    assert [stream.put(byte) for byte in "é".encode()[:1]] == [""]
    assert stream.end() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("text", ["Hello, world!", "naïve 漢字 😀 text", "  two  spaces\n\nlines"])
def test_a_real_tokenizer(text: str, small: Any) -> None:
    ids = small.tokenizer(text, add_special_tokens=False)["input_ids"]
    stream = TextStream(small.tokenizer)
    assert "".join(stream.put(token) for token in ids) + stream.end() == small.tokenizer.decode(ids)


class Counted:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.decoded = tokenizer, 0

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        self.decoded += len(ids)
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


@pytest.mark.parametrize("byte", [0x80, 0xF0, 0xC3, 0xFF])
def test_bytes_that_never_complete_a_character_cost_no_more_than_others(byte: int) -> None:
    count, tokenizer = 2000, Counted(Bytes())
    stream = TextStream(tokenizer)
    parts = [stream.put(each) for each in [*b"ab", *[byte] * count, *"é".encode()]]
    assert "".join(parts) + stream.end() == bytes([*b"ab", *[byte] * count, *"é".encode()]).decode(errors="replace")
    assert tokenizer.decoded < 5 * CONTEXT * count


@pytest.mark.parametrize("before", ["", "Hello"])
def test_special_tokens_cost_no_more_than_others(before: str, small: Any) -> None:
    """They add no text; what follows them reads as if they were not there."""
    tokenizer = Counted(small.tokenizer)
    stream, count = TextStream(tokenizer), 1000
    ids = small.tokenizer(before + " wörld 😀", add_special_tokens=False)["input_ids"]
    first = len(small.tokenizer(before, add_special_tokens=False)["input_ids"])
    parts = [stream.put(token) for token in [*ids[:first], *[small.tokenizer.eos_token_id] * count, *ids[first:]]]
    assert "".join(parts) + stream.end() == before + " wörld 😀"
    assert tokenizer.decoded < 5 * CONTEXT * count


@given(st.lists(st.integers(0, 48_000), max_size=60))
def test_any_tokens_make_what_they_are_decoded_to(small: Any, ids: list[int]) -> None:
    for skip in (True, False):
        pieces = Detokenizer(small.tokenizer, skip)
        parts = "".join(pieces.put(token) for token in ids) + pieces.end()
        assert parts == small.tokenizer.decode(ids, skip_special_tokens=skip)


def test_stop_strings_cost_no_more_for_text_that_is_almost_theirs() -> None:
    """Each character is looked at a few times, and not once for each beginning of each string."""
    looks = 0

    class Counted(str):
        def __getitem__(self, place: Any) -> str:
            nonlocal looks
            looks += 1
            return str.__getitem__(self, place)

    stop = StopString(Counted("a" * 500 + "b"))
    looks, count = 0, 3000
    assert not any(stop.put("a") for _ in range(count))
    assert looks < 5 * count
    assert stop.put("b")
    assert stop.matched == 501


@given(st.text(alphabet="ab", max_size=40), st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4))
def test_stop_strings_do_not_depend_on_how_a_text_is_split(text: str, stops: list[str]) -> None:
    class Words:
        """A tokenizer whose tokens are parts of the text, as long as their numbers say."""

        def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
            return "".join(parts[token] for token in ids)

    alone, _ = streamed(text, stops)
    parts = [text[start : start + 3] for start in range(0, len(text), 3)]
    stream, found = TextStream(Words(), stops), ""
    for token in range(len(parts)):
        found += stream.put(token)
        if stream.stopped:
            break
    assert found + stream.end() == "".join(alone)


class Words:
    """Writes a space between two tokens, and none before the first."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(f"w{token}" for token in ids)


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 40])
def test_text_that_goes_on_has_the_space_before_it(count: int) -> None:
    before, new = [*range(count)], [*range(count, 60)]
    decoder = Detokenizer(Words(), before=before)
    assert "".join(map(decoder.put, new)) + decoder.end() == " " + Words().decode(new)
    stream = TextStream(Words(), ["w0", " w50"], before)
    text = "".join(stream.put(token) for token in new if stream.stopped is None)
    assert text == " " + Words().decode([*range(count, 50)])
    assert stream.stopped == " w50"


@given(
    st.text("ab", max_size=14),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 8),
)
def test_no_stop_string_ends_a_text_before_its_least_tokens(text: str, stops: list[str], least: int) -> None:
    """It ends with the first one that ends with the last of these tokens or later; nothing of that one is shown."""
    stream = TextStream(Bytes(), stops, least=least)
    shown = ""
    for letter in text:
        if stream.stopped is None:
            shown += stream.put(ord(letter))
    shown += stream.end()
    ends = (end for end in range(max(1, least), len(text) + 1) if text[:end].endswith(tuple(stops)))
    end = next(ends, None)
    if end is None:
        assert (shown, stream.stopped) == (text, None)
    else:
        longest = max((stop for stop in stops if text[:end].endswith(stop)), key=len)
        assert (shown, stream.stopped) == (text[: end - len(longest)], longest)


@pytest.mark.parametrize("form", ["hermes", "mistral"])
def test_special_tokens_that_are_shown(form: str) -> None:
    """Their names are text, to stop strings too; other special tokens have none."""
    tokenizer = tool_tokenizer(form)
    added = tokenizer.get_added_vocab()
    marker = "<tool_call>" if form == "hermes" else "[TOOL_CALLS]"
    tokens = [*tokenizer("aé", add_special_tokens=False).input_ids, added["<user>"], added[marker], added["<s>"], 65]

    def read(shown: list[int], stops: list[str]) -> str:
        stream = TextStream(tokenizer, stops, shown=shown)
        pieces = [stream.put(token) for token in tokens if stream.stopped is None]
        return "".join([*pieces, stream.end()])

    assert read([added[marker]], []) == f"aé{marker}{tokenizer.decode([65])}"
    assert read([added[marker]], [marker]) == "aé"
    assert (marker in read([], [])) == (form == "hermes")  # a token that is not flagged as special
    assert added["<user>"] in list_special_tokens(tokenizer)
