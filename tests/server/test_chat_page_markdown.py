"""Markdown on the chat page: a look of the text that is there, which hides nothing and runs nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.helpers.page_browser import Visit, click, until

FENCE = "```"
ANSWER = f"""# A *plan*
1. Read **all of it**, `a*b*` and 2 * 3 * 4
- snake_case_name is *not* one
> said so

{FENCE}python
def f(x):
    return x ** 2  # **no**
{FENCE}
Done.
<tool_call>
{{"name": "f", "arguments": {{"x": "**1**"}}}}
</tool_call>
**End**
"""
HOSTILE = "**<img src=x onerror='hacked=1'>** [a](javascript:hacked=1) `</script><script>hacked=1</script>` a\u202eb\n"

# Shows an answer whose tokens are the pieces, and returns its text, and the look of each of its parts.
SHOW = """
const turn = { user: "Q", start: 0, pieces: arguments[0], messages: null, answer: 0, note: "", lost: false };
const view = new TurnView(new Tokens(), turn), body = view.answer.body;
find("log").replaceChildren(view.element);
window.shown = view;
const parts = [], walk = document.createTreeWalker(body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const { data, parentNode } = walk.currentNode;
  const name = parentNode.localName;
  if (name !== "button") parts.push([data, name === "md-part" ? parentNode.className : ""]);
}
return [parts, [...new Set([...body.querySelectorAll("*")].map(({ localName }) => localName))].sort()];
"""


def show(browser: Any, pieces: list[str]) -> list[tuple[str, str]]:
    """The characters of an answer, each with its look."""
    parts, names = browser.execute_script(SHOW, pieces)
    assert set(names) <= {"span", "md-part", "button"}
    return [(character, look) for data, look in parts for character in data]


def join(found: list[tuple[str, str]], look: str) -> list[str]:
    """The longest runs of characters that have a look."""
    runs, before = list[str](), False
    for character, has in found:
        if look in has.split():
            runs[-1:] = [runs[-1] + character] if before else [*runs[-1:], character]
        before = look in has.split()
    return runs


def without_spaces(found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """A space that begins a token stands outside of it, and has no look."""
    return [(character, "" if character == " " else look) for character, look in found]


def cut(text: str, seed: int) -> list[str]:
    chance, pieces = random.Random(seed), list[str]()
    while text:
        length = chance.choice((1, 1, 2, 3, 5, 9))
        pieces.append(text[:length])
        text = text[length:]
    return pieces


def test_looks_of_an_answer(visit: Visit, open_address: str) -> None:
    browser = visit(open_address)
    found = show(browser, [ANSWER])
    assert "".join(character for character, _ in found) == ANSWER
    assert join(found, "heading") == ["A ", "plan"]
    assert join(found, "strong") == ["all of it", "End"]
    assert join(found, "em") == ["plan", "not"]
    code = "".join(character for character, look in found if look == "code")
    assert code == 'a*b*def f(x):\n    return x ** 2  # **no**\n<tool_call>{"name": "f", "arguments": {"x": "**1**"}}\n'
    marks = "".join(character for character, look in found if "mark" in look.split())
    assert marks == "# **1. ****``- **> ```python```</tool_call>****"


@pytest.mark.parametrize("seed", range(2))
def test_looks_do_not_depend_on_the_tokens(seed: int, visit: Visit, open_address: str) -> None:
    """Nor on how often a line was looked at before it ended."""
    browser = visit(open_address)
    whole = without_spaces(show(browser, [ANSWER]))
    assert without_spaces(show(browser, cut(ANSWER, seed))) == whole
    assert without_spaces(show(browser, [*cut(ANSWER, seed + 100), ""])) == [*whole, ("·", "")]


def test_hostile_answers_stay_text(visit: Visit, open_address: str) -> None:
    browser = visit(open_address)
    found = show(browser, cut(HOSTILE, 0))
    assert "".join(character for character, _ in found) == HOSTILE.replace("\u202e", "[U+202E]")
    assert browser.execute_script("return [document.images.length, document.links.length, typeof hacked]") == [
        *(0, 0, "undefined")
    ]


@pytest.mark.parametrize("mark", ["*", "`", "**a ", "```\n"])
def test_long_answers_of_marks_take_no_long_time(mark: str, visit: Visit, open_address: str) -> None:
    """Of lines that are longer than any that is looked at, and of many short ones."""
    browser = visit(open_address)
    text = mark * (20_000 // len(mark))
    found = show(browser, [text[i : i + 50] for i in range(0, len(text), 50)])
    assert "".join(character for character, _ in found) == text


def test_code_is_copied(visit: Visit, open_address: str) -> None:
    browser = visit(open_address)
    permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    browser.execute_cdp_cmd("Browser.grantPermissions", {"origin": open_address, "permissions": permissions})
    show(browser, cut(ANSWER, 1))
    assert browser.execute_script("return document.querySelectorAll('.copy-code').length") == 2
    click(browser, ".copy-code")
    until(browser, "document.querySelector('.copy-code').textContent === 'Copied'")
    copied = browser.execute_async_script("navigator.clipboard.readText().then(arguments[0])")
    assert copied == "def f(x):\n    return x ** 2  # **no**\n"
    second = browser.execute_script("return document.querySelectorAll('.copy-code')[1].code()")
    assert second == '{"name": "f", "arguments": {"x": "**1**"}}\n'
