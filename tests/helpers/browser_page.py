"""A long page for the browser tests, and functions that measure where its parts are."""

from __future__ import annotations

import re
import textwrap
from functools import cache
from typing import Any

import numpy

from msrnn.analysis.explorer import PolicyTrace, page
from msrnn.hf.trace import ChunkTrace
from tests.analysis.test_browser import settle

LENGTH, SIZE, LAYERS = 900, 225, (3, 7, 11)
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
SENTENCE = (
    "There was a slight jarring through the whole frame of the coach, a grinding and hissing from the brakes (and from "
    "the lantern), and then a sudden jolt as the vehicle recoiled from the arrested horses."
)


@cache
def story() -> str:
    """Paragraphs wrapped at 70 columns, under a window, and under a policy that keeps every tenth token."""
    paragraph = textwrap.fill(f"{SENTENCE} {SENTENCE}", 70)
    tokens = re.findall(r" ?[A-Za-z]+|\n|[^A-Za-z\s]+| ", "\n\n".join([paragraph] * 20))[:LENGTH]
    window = numpy.minimum(numpy.arange(LENGTH) + SIZE, LENGTH).astype(numpy.int32)
    tenth = numpy.where(numpy.arange(LENGTH) % 10 == 0, LENGTH, numpy.minimum(numpy.arange(LENGTH) + 40, LENGTH))
    shown = [
        PolicyTrace(name, SIZE, ChunkTrace(numpy.tile(times, (3, heads, 1)).astype(numpy.int32), LAYERS, (SIZE,) * 3))
        for name, times, heads in (("window", window, 1), ("tenth", tenth, 2))
    ]
    return page("story", "by hand", tokens, shown)


RECTANGLES = """
return arguments[0].map((selector) => {
  const one = [...document.querySelectorAll(selector)].find((found) => found.offsetParent ?? found.offsetWidth);
  const { left, top, right, bottom } = one.getBoundingClientRect();
  return [left, top, right, bottom];
});
"""
# Whether what is seen at the middle of an element is the element itself.
UNCOVERED = """
return arguments[0].map((selector) => {
  const one = [...document.querySelectorAll(selector)].find((found) => found.offsetWidth);
  const { left, top, right, bottom } = one.getBoundingClientRect();
  const seen = document.elementFromPoint((left + right) / 2, (top + bottom) / 2);
  return one.contains(seen) || seen?.contains(one) && seen.closest("#bar, .head") !== null;
});
"""


def rectangles(browser: Any, *selectors: str) -> list[list[float]]:
    return browser.execute_script(RECTANGLES, selectors)


def apart(one: list[float], other: list[float]) -> bool:
    return one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


def frames(browser: Any, count: int = 4) -> None:
    for _ in range(count):
        settle(browser)
