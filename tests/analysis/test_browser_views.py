"""The page on a desktop and on a phone: legend, axes, bars and token cards; nothing covers the selected token."""

from __future__ import annotations

import textwrap

import numpy
import pytest

from msrnn.analysis.explorer import PolicyTrace, page
from msrnn.hf.trace import ChunkTrace
from tests.analysis.test_browser import move, text
from tests.helpers.browser_page import DESKTOP, LENGTH, PHONE, SENTENCE, UNCOVERED, apart, frames, rectangles, story
from tests.helpers.handmade import Visit

SWATCHES = "return [...document.querySelectorAll('#legend .swatch')].map((i) => [i.textContent, i.className.slice(-2)])"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "size", "top"), [(900, 225, 450), (2048, 256, 1000), (65535, 256, 33000), (8, 2, 4)]
)
def test_the_legend_ends_at_half_of_the_text(visit: Visit, length: int, size: int, top: int) -> None:
    """And a token has the shade of the swatch that its steps kept are in."""
    kept = numpy.minimum(1 + numpy.arange(length)[::-1], 1 + numpy.arange(length) * 5 % (length - 1))
    if length > 10_000:  # the legend alone: a long text takes seconds to lay out
        browser = visit(story())
        starts = browser.execute_script("return shadeStarts(arguments[0], arguments[1])", size, length)
        assert (starts[0], starts[-1], len(starts)) == (size // 8, top, 7)
        return
    times = numpy.where(numpy.arange(length) + kept >= length, length, numpy.arange(length) + kept - 1)
    traced = ChunkTrace(times.astype(numpy.int32)[None, None], (0,), (size,))
    browser = visit(page("steps", "by hand", ["a "] * length, [PolicyTrace("tova", size, traced)]))
    swatches = browser.execute_script(SWATCHES)
    starts = [1, *(int(name.rstrip("+").replace(",", "")) for name, _ in swatches[1:])]
    assert starts == sorted(set(starts))
    assert starts[-1] == top
    assert swatches[0][0] == f"< {starts[1]}"
    assert swatches[0][1] == "k0"
    assert swatches[-1][1] == "k7"  # the hottest colour is for the longest kept, however short the text
    found = browser.execute_script("return [...document.querySelectorAll('.text span')].map((span) => span.className)")
    expected = [swatches[numpy.searchsorted(starts, steps, "right") - 1][1] for steps in kept]
    assert [next((part for part in name.split() if part[0] == "k"), "k0") for name in found] == expected
    assert len(set(expected)) == len(swatches)


TICKS = """
const chart = document.querySelector(".chart"), boxes = [...chart.querySelectorAll(".plot")];
return [...chart.querySelectorAll(".axis")].map((axis, i) => {
  const { left, top, width, height } = boxes[Math.floor(i / 2)].getBoundingClientRect();
  const marks = [...axis.querySelectorAll("span")].map((mark) => {
    const box = mark.getBoundingClientRect();
    return [mark.textContent, ((box.left + box.right) / 2 - left) / width, ((box.top + box.bottom) / 2 - top) / height];
  });
  return [axis.querySelector("b")?.textContent ?? "", marks];
});
"""


@pytest.mark.slow
@pytest.mark.parametrize("shape", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_axes_of_the_maps(visit: Visit, shape: dict[str, int]) -> None:
    browser = visit(story(), "#step=500", **shape)
    steps, tokens, layers, again = browser.execute_script(TICKS)
    assert [steps[0], layers[0]] == ["step (tokens read)", "layer"]
    assert [mark[0] for mark in steps[1]] == ["0", "200", "400", "600", "800"]
    assert [mark[0] for mark in tokens[1]] == [mark[0] for mark in again[1]] == ["token 0", "200", "400", "600", "800"]
    assert [mark[0] for mark in layers[1]] == ["3", "7", "11"]  # the model's own numbers
    for name, _, down in steps[1][1:]:
        assert abs(down - (int(name) + 0.5) / LENGTH) < 0.01
    for name, across, _ in [*tokens[1][1:], *again[1][1:]]:
        assert abs(across - (int(name) + 0.5) / LENGTH) < 0.01
    assert text(browser, ".moment") == "held at step 500, by layer"
    width = browser.execute_script("return document.documentElement.scrollWidth")
    assert width == shape["width"]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_legend_and_counts_stay_while_following(visit: Visit, shape: dict[str, int]) -> None:
    browser = visit(story(), "#step=5", **shape)
    places = []
    for step in (600, 850, 300):
        move(browser, "step", step)
        frames(browser)
        seen = ["#legend .k0", "#legend .k7", ".stats", "h2", "#query", "#step", ".now"]
        assert dict(zip(seen, browser.execute_script(UNCOVERED, seen), strict=True)) == dict.fromkeys(seen, True)
        assert text(browser, ".stats").startswith(f"sees 226 of {step + 1} · 100% recent · ")
        places.append(rectangles(browser, "#legend", ".stats"))
    assert places[0] == places[1] == places[2]  # nothing jumps


@pytest.mark.slow
@pytest.mark.parametrize("shape", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_story_never_covers_its_token(visit: Visit, shape: dict[str, int]) -> None:
    browser = visit(story(), "#step=450&layer=7", **shape)
    frames(browser)
    script = """
    return [...document.querySelectorAll(".panel:not([hidden]) .text span")].filter((span) => {
      const box = span.getBoundingClientRect();
      const seen = document.elementFromPoint(box.left + 2, (box.top + box.bottom) / 2);
      return box.width > 3 && seen === span;
    }).filter((_, i, all) => i % Math.ceil(all.length / 12) === 0);
    """
    tokens = browser.execute_script(script)
    assert len(tokens) > 8
    heights = set()
    for token in tokens:
        browser.execute_script("arguments[0].click()", token)
        card, legend, counts, focus = rectangles(browser, "#token-card", "#legend", ".stats", ".focus")
        assert apart(card, focus)
        assert apart(card, legend)
        assert 0 <= card[0] < card[2] <= shape["width"]
        assert 0 <= card[1] < card[3] <= shape["height"]
        if shape is PHONE:
            assert apart(card, counts)
            assert apart(card, rectangles(browser, "#controls")[0])
        heights.add(card[1])
    assert len(heights) > 1  # below some, above others
    for distance in (150, -300, 250):  # the card gives way when the text is scrolled under it
        browser.execute_script("scrollBy(0, arguments[0])", distance)
        frames(browser)
        card, focus = rectangles(browser, "#token-card", ".focus")
        assert apart(card, focus)
    if shape is PHONE:  # following keeps clear of a card that stays open
        move(browser, "step", 700)
        frames(browser)
        card, now = rectangles(browser, "#token-card", ".now")
        assert apart(card, now)


LINES = """
const spans = [...document.querySelectorAll(".panel:not([hidden]) .text span")];
return spans.map((span) => {
  const { left, top, width } = span.getBoundingClientRect();
  return [span.textContent, top, "wrapped" in span.dataset];
});
"""


@pytest.mark.slow
@pytest.mark.parametrize("shape", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_wrapped_lines_flow_as_paragraphs(visit: Visit, shape: dict[str, int]) -> None:
    browser = visit(story(), **shape)
    spans = browser.execute_script(LINES)[:260]
    paragraph = textwrap.fill(f"{SENTENCE} {SENTENCE}", 70)
    assert text(browser, ".text").startswith(f"{paragraph}\n\n{paragraph}\n\n")  # the true text
    wraps = [i for i, (piece, _, joined) in enumerate(spans) if joined]
    assert {spans[i][0] for i in wraps} == {"\n"}
    assert len(wraps) >= 2 * paragraph.count("\n")
    same_line = [spans[i - 1][1] == spans[i + 1][1] for i in wraps]
    assert sum(same_line) > len(wraps) / 2  # but where the window's own edge is
    ends = [i for i in range(len(spans) - 2) if spans[i][0] == spans[i + 1][0] == "\n"]
    assert ends
    for i in ends:
        assert spans[i - 1][1] < spans[i + 1][1] < spans[i + 2][1]  # a blank line
