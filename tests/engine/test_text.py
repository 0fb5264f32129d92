"""The text of an answer as it grows: whole characters, and stop strings that no part of is ever shown."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrnn.engine.text import TextStream


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
