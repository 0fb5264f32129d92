from __future__ import annotations

import re
import textwrap

import pytest

from msrnn.analysis.explorer import find_wrapped_tokens

PROSE = (
    "There was a slight jarring through the whole frame of the coach, a grinding and hissing from the brakes, and then "
    "a sudden jolt as the vehicle ran upon and recoiled from the taut pole-straps of the now arrested horses. The "
    "murmur of a voice in the road was heard, followed by the impatient accents of the driver, who wanted to know why."
)
SPEECH = (
    "'What is it?' asked the passenger, who had opened the window and leaned out as far as he dared to in the rain."
)
VERSE = """\
Tell me not, in mournful numbers,
Life is but an empty dream!
For the soul is dead that slumbers,
And things are not what they seem.
Life is real! Life is earnest!
And the grave is not its goal."""
CODE = """\
def wrapped(tokens):
    breaks = list(find_the_breaks_of("".join(tokens), everywhere=True))
    column = the_column_that_most_of_them_allow(breaks, narrowest=50)
    if column is None:
        return []
    return [token for token in breaks if token.needed > column * SLACK]
print(wrapped(["a", "b"]))
print(wrapped(["c", "d"]))"""


def tokens(text: str) -> list[str]:
    found = re.findall(r" ?[A-Za-z]+|\n+|\s|[^A-Za-z\s]+", text)
    assert "".join(found) == text
    return found


def shown(pieces: list[str]) -> str:
    """The text as the page shows it."""
    joined = set(find_wrapped_tokens(pieces))
    return "".join(piece.replace("\n", " ") if i in joined else piece for i, piece in enumerate(pieces))


@pytest.mark.parametrize("width", [60, 70, 100])
def test_paragraphs_of_a_wrapped_text_flow(width: int) -> None:
    paragraphs = [PROSE, SPEECH, PROSE]
    text = "\n\n".join(textwrap.fill(paragraph, width) for paragraph in paragraphs)
    for pieces in (tokens(text), list(text), re.findall(r"\S+\s*", text)):  # words, characters, words with their breaks
        assert shown(pieces) == "\n\n".join(paragraphs)


def test_carriage_returns() -> None:
    text = textwrap.fill(PROSE, 70).replace("\n", "\r\n")
    assert shown(tokens(text)).replace("\r", "") == PROSE


def test_verse_and_lists_in_a_wrapped_text_keep_their_lines() -> None:
    prose = textwrap.fill(PROSE, 70)
    items = f"- {SPEECH[:60]}\n- {SPEECH[:62]}\n2. {SPEECH[:61]}"
    text = "\n\n".join([prose, VERSE, prose, items, f"{prose}\n     {SPEECH[:60]}"])
    assert shown(tokens(text)) == "\n\n".join([PROSE, VERSE, PROSE, items, f"{PROSE}\n     {SPEECH[:60]}"])


PLAIN = {
    "verse": VERSE,
    "code": CODE,
    "a paragraph on each line": f"{PROSE}\n{SPEECH}\n{PROSE}\n{SPEECH}\n{PROSE[:150]}\n{SPEECH}",
    "two lines": f"{PROSE[:70]}\n{PROSE[70:130]}",
    "numbers": "\n".join(",".join(str(17 * i + j) for j in range(20)) for i in range(10)),
    "one line": PROSE,
    "nothing but lines": "\n" * 9,
    "empty": "",
}


@pytest.mark.parametrize("name", PLAIN)
def test_other_texts_keep_their_lines(name: str) -> None:
    assert find_wrapped_tokens(tokens(PLAIN[name])) == []
