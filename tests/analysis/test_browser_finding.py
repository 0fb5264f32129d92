"""Search, the page's address, keys and what is read aloud."""

from __future__ import annotations

from typing import Any

import pytest

from msrnn.analysis.explorer import page
from tests.analysis.test_browser import TOKENS, TWO, move, press, text
from tests.helpers.browser_page import DESKTOP, UNCOVERED, frames, story
from tests.helpers.handmade import Visit


def query(browser: Any, words: str) -> str:
    box = browser.find_element("id", "query")
    box.clear()
    box.send_keys(words)
    return text(browser, "#hits")


FOCUS = "return [...document.querySelectorAll('.focus')].map((span) => Number(span.dataset.token))"
HITS = """
return [...document.querySelectorAll(".text")].map((text) =>
  [...text.querySelectorAll("[data-hit]")].map((span) => span.textContent));
"""


def test_finding_words(visit: Visit) -> None:
    from selenium.webdriver.common.keys import Keys

    browser = visit(story(), "#step=450&layer=7", **DESKTOP)
    count = int(query(browser, "lantern").split()[0])
    assert text(browser, "#hits") == f"{count} hits"
    assert browser.execute_script(HITS) == [["lantern"] * count] * 2
    box = browser.find_element("id", "query")
    places = []
    for number in range(1, count + 1):
        box.send_keys(Keys.ENTER)
        frames(browser)
        assert text(browser, "#hits") == f"{number} of {count}"
        first, second = browser.execute_script(FOCUS)
        assert first == second
        places.append(first)
        assert text(browser, "#token-card").startswith("␣lantern token ")
        assert browser.execute_script(UNCOVERED, [".focus"]) == [True]
    assert places == sorted(set(places))
    box.send_keys(Keys.ENTER)
    assert (text(browser, "#hits"), browser.execute_script(FOCUS)[0]) == (f"1 of {count}", places[0])
    browser.find_element("id", "previous").click()
    assert (text(browser, "#hits"), browser.execute_script(FOCUS)[0]) == (f"{count} of {count}", places[-1])
    browser.find_element("id", "next").click()
    box.send_keys(Keys.SHIFT, Keys.ENTER)
    assert text(browser, "#hits") == f"{count} of {count}"
    assert text(browser, "#step-shown") == "450 of 899"
    box.send_keys(Keys.ESCAPE)
    assert (text(browser, "#hits"), browser.execute_script(HITS)) == ("", [[], []])


@pytest.mark.slow
def test_finding_across_tokens_and_lines(visit: Visit) -> None:
    browser = visit(page("hand", "by hand", TOKENS, TWO))
    assert query(browser, "FIVE") == "1 hit"  # two tokens, in capitals
    assert browser.execute_script(HITS)[0] == ["fi", "ve"]
    assert query(browser, "two  three") == "1 hit"  # over a line break
    assert browser.execute_script(HITS)[0] == ["two", "\n", "three"]
    assert query(browser, ",") == "1 hit"
    for words in ("six", "(", "[a-z]", "\\", ".*", "+"):
        assert query(browser, words) == "no hits"
        assert not browser.find_element("id", "next").is_enabled()
    assert query(browser, " ") == ""


@pytest.mark.slow
def test_keys_belong_to_the_box_while_typing(visit: Visit) -> None:
    from selenium.webdriver.common.keys import Keys

    browser = visit(page("hand", "by hand", TOKENS, TWO), "#step=5&layer=0&head=0")
    press(browser, "/")
    press(browser, "f", "s", " ", ",", ".", Keys.ARROW_LEFT, Keys.HOME)
    assert browser.execute_script("return document.getElementById('query').value") == "fs ,."
    assert text(browser, "#step-shown") == "5 of 7"
    assert text(browser, "#head-shown") == "0"
    press(browser, Keys.ESCAPE, Keys.ARROW_LEFT)
    assert text(browser, "#step-shown") == "4 of 7"


def address(browser: Any) -> dict[str, str]:
    """Once it has been written."""
    browser.execute_async_script("setTimeout(arguments[0], 260)")
    found = browser.execute_script("return location.hash").lstrip("#")
    return dict(part.split("=") for part in found.split("&"))


def where(browser: Any) -> tuple[str, str, str]:
    return text(browser, "#step-shown"), text(browser, "#layer-shown"), text(browser, "#head-shown")


@pytest.mark.slow
def test_the_address_follows_and_leads(visit: Visit) -> None:
    browser = visit(story(), "#step=640&layer=7&head=1", **DESKTOP)
    assert where(browser) == ("640 of 899", "7", "1")
    assert browser.execute_script(UNCOVERED, [".now"]) == [True]  # a link to a step shows the step
    assert address(browser) == {"step": "640", "layer": "7", "head": "1", "fade": "1"}
    move(browser, "step", 641)
    move(browser, "layer", 2)
    move(browser, "head", -1)
    assert address(browser) == {"step": "641", "layer": "11", "head": "all", "fade": "1"}
    link = browser.execute_script("return location.href")
    browser.get("about:blank")
    browser.get(link)
    frames(browser, 6)
    assert where(browser) == ("641 of 899", "11", "all")
    browser.execute_script("location.hash = 'step=20&layer=3&head=0&token=12'")  # as a link on the page would
    frames(browser, 6)
    assert where(browser) == ("20 of 899", "3", "0")
    assert browser.execute_script(FOCUS) == [12, 12]


BAD = {
    "step=99999999999999999999999&layer=7": ("899 of 899", "7", "all"),
    "step=-4&layer=-1&head=-1": ("0 of 899", "all", "all"),
    "step=abc&layer=&head=NaN": ("899 of 899", "all", "all"),
    "step=1e2&layer=4&head=2": ("899 of 899", "all", "all"),  # there is no layer 4, and no head 2
    "step=5.5&layer=7&token=900": ("899 of 899", "7", "all"),
    "step=10&step=20&theme=red&fade=maybe": ("10 of 899", "all", "all"),
    "%%%&=&step=12&constructor=1&__proto__=2": ("12 of 899", "all", "all"),
    "layer=all&head=all": ("899 of 899", "all", "all"),
}


def test_bad_addresses(visit: Visit) -> None:
    browser = visit(story(), **DESKTOP)
    for part, expected in BAD.items():
        browser.execute_script(  # from where a page starts
            "for (const [name, value] of [['step', 899], ['layer', -1], ['head', -1]]) {"
            "const slider = document.getElementById(name); slider.value = value;"
            "slider.dispatchEvent(new Event('input')); }"
        )
        frames(browser, 2)
        browser.execute_script("location.hash = arguments[0]", part)
        frames(browser)
        assert (part, where(browser)) == (part, expected)
        assert browser.execute_script(FOCUS) == []
    first, expected = next(iter(BAD.items()))
    assert where(visit(story(), f"#{first}")) == expected


CONTRASTS = """
const channel = (value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
const light = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map((part) => channel(part / 255))
  .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (one) => {
  const colour = getComputedStyle(one).backgroundColor;
  return /, 0\\)$/.test(colour) ? behind(one.parentElement) : colour;
};
const contrast = (one) => {
  const pair = [light(getComputedStyle(one).color), light(behind(one))].sort((a, b) => b - a);
  return (pair[0] + 0.05) / (pair[1] + 0.05);
};
return arguments[0].map((selector) =>
  Math.min(...[...document.querySelectorAll(selector)].filter((one) => one.offsetWidth).map(contrast)));
"""


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast(visit: Visit, theme: str) -> None:
    browser = visit(story(), f"#step=899&layer=7&fade=0&theme={theme}", **DESKTOP)
    query(browser, "lantern")
    texts = ["#about", ".stats", "h2 small", ".scale span", ".axis b", ".moment", ".swatch", "#hits", "button", ".held"]
    texts += ["footer p", "kbd"]
    found = browser.execute_script(CONTRASTS, texts)
    assert {name: round(value, 2) for name, value in zip(texts, found, strict=True) if not 4.5 <= value <= 21} == {}


UNNAMED = """
return [...document.querySelectorAll("button, input, [role=img], section, form")].filter((one) =>
  !(one.getAttribute("aria-label") || one.closest("label") || one.textContent.trim() || one.id === "search"))
  .map((one) => one.outerHTML);
"""


@pytest.mark.slow
def test_everything_has_a_name_to_be_read_aloud(visit: Visit) -> None:
    browser = visit(story(), "#step=300&layer=7&head=0", **DESKTOP)
    assert browser.execute_script(UNNAMED) == []
    spoken = "return ['step', 'layer', 'head'].map((id) => document.getElementById(id).getAttribute('aria-valuetext'))"
    assert browser.execute_script(spoken) == ["300 of 899", "7", "0"]
    move(browser, "layer", -1)
    assert browser.execute_script(spoken) == ["300 of 899", "all", "0"]
    play = browser.find_element("id", "play")
    for label in ("Pause", "Play"):
        play.click()
        assert play.get_attribute("aria-label") == label
    legend = browser.find_element("id", "legend").get_attribute("aria-label")
    assert legend.startswith("Shades: steps kept, < 28, 28+, ")
