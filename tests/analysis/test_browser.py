"""The page in a real browser: what it shows is what the eviction times say."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from numpy.typing import NDArray

from msrnn.analysis.explorer import PolicyTrace, page, visible
from msrnn.hf.trace import ChunkTrace
from tests.analysis.test_page import HOSTILE
from tests.helpers.handmade import LENGTH, SINK, SIZE, WINDOW, Visit, traced

TOKENS = ["One", " two", "\n", " three", ",", " four", " fi", "ve"]
TWO = [PolicyTrace("tova", SIZE, traced(WINDOW, SINK)), PolicyTrace("h2o", SIZE, traced([SINK, WINDOW], [SINK, SINK]))]

MOVE = """
const [name, value, done] = arguments, slider = document.getElementById(name);
slider.value = value;
slider.dispatchEvent(new Event("input", { bubbles: true }));
requestAnimationFrame(() => setTimeout(done));
"""
CLASSES = """
const panels = [...document.querySelectorAll(".text")];
return panels.map((panel) => [...panel.querySelectorAll("span")].map((span) => span.className));
"""


def move(browser: Any, name: str, value: int) -> None:
    """Move a slider, and wait for the frame that shows it."""
    browser.execute_async_script(MOVE, name, value)


def press(browser: Any, *keys: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(browser).send_keys(*keys).perform()
    settle(browser)


def settle(browser: Any) -> None:
    """Until the next frame is drawn."""
    browser.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0]))")


def text(browser: Any, selector: str) -> str:
    return str(browser.execute_script("return document.querySelector(arguments[0]).textContent", selector))


def states(names: list[str]) -> str:
    """A letter for each token: unread, held, faded."""
    return "".join("u" if "unread" in name else "h" if "held" in name.split() else "f" for name in names)


def shades(names: list[str]) -> list[int]:
    return [next((int(part[1:]) for part in name.split() if part[0] == "k"), 0) for name in names]


def expected(times: list[int], step: int) -> str:
    return "".join("u" if j > step else "h" if step <= last else "f" for j, last in enumerate(times))


def test_tokens_are_shaded_as_the_eviction_times_say(visit: Visit) -> None:
    browser = visit(page("hand", "by hand", TOKENS, TWO))
    # Means over layers of 3, 3, … 2, 1 and 8, 2, … 2, 1 steps: shades begin at 2, 3 and 4, half of the text.
    assert shades(browser.execute_script(CLASSES)[0]) == [7, *[2] * 6, 0]
    seen = set()
    for layer, (left, right) in enumerate([(WINDOW, SINK), (SINK, SINK)]):
        move(browser, "layer", layer)
        move(browser, "head", 0)
        for step in (0, 2, 3, 5, LENGTH - 1):
            move(browser, "step", step)
            panels = [states(names) for names in browser.execute_script(CLASSES)]
            assert panels == [expected(left, step), expected(right, step)]
            seen.add(tuple(panels))
            assert browser.execute_script("return document.querySelector('.now').dataset.token") == str(step)
    assert len(seen) == 8  # nothing is evicted before step 3
    move(browser, "layer", 0)
    move(browser, "head", 1)
    assert states(browser.execute_script(CLASSES)[1]) == expected(WINDOW, LENGTH - 1)
    assert "sees 3 of 8 · 100% recent" in text(browser, ".stats")


@pytest.mark.slow
def test_all_layers_trace_batch(visit: Visit) -> None:
    browser = visit(page("hand", "by hand", TOKENS, TWO[:1]), "#step=5&layer=-1")
    # At step 5, layer 0 sees 3, 4 and 5, layer 1 sees 0, 4 and 5; what one of two has forgotten is half faded.
    assert [name.split()[0] for name in browser.execute_script(CLASSES)[0]] == [
        *("f2", "f4", "f4", "f2", "held", "held", "unread", "unread")
    ]
    assert "sees 3 of 6" in text(browser, ".stats")
    assert text(browser, "#layer-shown") == "all"
    assert not browser.find_element("id", "head-label").is_displayed()


@pytest.mark.slow
def test_fading_can_be_switched_off(visit: Visit) -> None:
    browser = visit(page("hand", "by hand", TOKENS, TWO), "#step=5&layer=0")
    assert "f" in states(browser.execute_script(CLASSES)[0])
    press(browser, "f")
    assert states(browser.execute_script(CLASSES)[0]) == "hhhhhhuu"
    assert shades(browser.execute_script(CLASSES)[0])[:6] == [5] * 6  # all were kept for three steps


def test_keys_and_the_address(visit: Visit) -> None:
    from selenium.webdriver.common.keys import Keys

    browser = visit(page("hand", "by hand", TOKENS, TWO), "#step=5&layer=0&head=0")

    def where() -> tuple[str, str, str]:
        return text(browser, "#step-shown"), text(browser, "#layer-shown"), text(browser, "#head-shown")

    assert where() == ("5 of 7", "0", "0")
    press(browser, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert where() == ("3 of 7", "0", "0")
    press(browser, Keys.ARROW_RIGHT, Keys.ARROW_DOWN, ".")
    assert where() == ("4 of 7", "1", "1")
    press(browser, Keys.HOME, Keys.ARROW_LEFT, Keys.ARROW_UP, Keys.ARROW_UP, Keys.ARROW_UP)
    assert where() == ("0 of 7", "all", "1")
    press(browser, Keys.END)
    assert where()[0] == "7 of 7"


WATCH = """
const shown = document.getElementById("step-shown");
window.steps = [];
new MutationObserver(() => window.steps.push(shown.textContent)).observe(shown, { childList: true });
"""


@pytest.mark.slow
def test_reading_on(visit: Visit) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    browser = visit(page("hand", "by hand", TOKENS, TWO))
    browser.execute_script(WATCH)
    press(browser, " ")
    WebDriverWait(browser, 5).until(lambda _: browser.execute_script("return window.steps.at(-1)") == "7 of 7")
    steps = browser.execute_script("return window.steps")
    assert steps == sorted(steps)
    assert len(set(steps)) > 3
    assert text(browser, "#play") == "▶"


@pytest.mark.slow
def test_a_tokens_card(visit: Visit) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    browser = visit(page("hand", "by hand", TOKENS, TWO), "#step=3&layer=0&head=0")
    token = browser.find_element("css selector", '[data-token="1"]')
    ActionChains(browser).move_to_element(token).perform()
    told = text(browser, "#token-card")
    assert told.startswith("␣two token 1 · read at step 1")
    assert "tovaevicted at step 3, after 3 steps" in told
    assert "h2oevicted at step 2, after 2 steps" in told
    assert "at step 3 held in 1 of 2 layers" in told
    assert browser.execute_script("return [...document.querySelectorAll('.bars i')].map(i => i.className)") == [
        *("held chosen", "", "held chosen", "")  # of h2o's layer 0, one of two heads
    ]
    ActionChains(browser).move_to_element(browser.find_element("css selector", '[data-token="0"]')).perform()
    assert "h2onever evicted" in text(browser, "#token-card")
    assert len(browser.find_elements("css selector", ".focus")) == 2
    ActionChains(browser).move_to_element(browser.find_element("tag name", "h1")).perform()
    assert not browser.find_element("id", "token-card").is_displayed()


PIXELS = """
const canvas = document.querySelectorAll(".map canvas")[2 * arguments[0]], { width, height } = canvas;
const data = canvas.getContext("2d").getImageData(0, 0, width, height).data;
return Array.from({ length: 8 }, (_, t) => Array.from({ length: 8 }, (_, j) => {
  const i = 4 * (Math.floor((t + 0.5) * height / 8) * width + Math.floor((j + 0.5) * width / 8));
  return [data[i], data[i + 1], data[i + 2]].join();
}));
"""


def test_the_map_is_the_mask(visit: Visit) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    browser = visit(page("hand", "by hand", TOKENS, TWO), "#step=7&layer=1&head=0&theme=light")
    for panel in range(2):
        found = browser.execute_script(PIXELS, panel)
        empty = found[0][7]
        mask = [[colour != empty for colour in row] for row in found]
        assert mask == [[j <= t <= SINK[j] for j in range(LENGTH)] for t in range(LENGTH)]
    box = browser.find_element("css selector", ".map")
    ActionChains(browser).move_to_element_with_offset(box, 0, 5).click().perform()
    assert text(browser, "#step-shown") == "4 of 7"
    settle(browser)
    assert states(browser.execute_script(CLASSES)[0]) == expected(SINK, 4)


def test_hostile_text_stays_text(visit: Visit) -> None:
    tokens = [*HOSTILE, "\n", " end"]
    times = numpy.full((2, 1, len(tokens)), len(tokens), dtype=numpy.int32)
    shown = PolicyTrace("<img src=x onerror=alert(2)>", 4, ChunkTrace(times, (0, 1), (4, 4)))
    browser = visit(page("<script>alert(3)</script>", "</title><script>alert(4)</script>", tokens, [shown]))
    assert text(browser, ".text") == "".join(map(visible, tokens))
    assert "<script>alert(1)</script>" in browser.find_element("css selector", ".text").text
    assert len(browser.find_elements("tag name", "script")) == 2
    assert browser.find_elements("tag name", "img") == []
    assert text(browser, "#about") == "</title><script>alert(4)</script>"
    body = browser.find_element("tag name", "body")
    assert browser.execute_script("return arguments[0].scrollWidth <= innerWidth", body)  # long lines are broken


@pytest.mark.slow
def test_light_and_dark(visit: Visit) -> None:
    browser = visit(page("hand", "by hand", TOKENS, TWO), "#theme=light")
    colours = []
    for _ in range(2):
        colours.append(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
        browser.find_element("id", "theme").click()
    assert len(set(colours)) == 2
    assert browser.execute_script("return document.documentElement.dataset.theme") == "light"


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1280])
def test_on_a_phone_one_policy_at_a_time(visit: Visit, width: int) -> None:
    browser = visit(page("hand", "by hand", TOKENS, TWO), width=width)
    panels = browser.find_elements("css selector", ".panel")
    if width > 600:
        assert all(panel.is_displayed() for panel in panels)
        return
    assert [panel.is_displayed() for panel in panels] == [True, False]
    browser.find_element("css selector", "#tabs button:last-child").click()
    assert [panel.is_displayed() for panel in panels] == [False, True]
    assert browser.execute_script("return document.documentElement.scrollWidth") == width


# Of each text: the tokens whose class changes, and how many elements are added or removed.
OBSERVE = """
window.changes = [...document.querySelectorAll(".text")].map((text) => {
  const change = { tokens: new Set(), elements: 0 };
  change.observer = new MutationObserver((records) => records.forEach((record) => {
    if (record.type === "childList") change.elements += record.addedNodes.length + record.removedNodes.length;
    else change.tokens.add(Number(record.target.dataset.token));
  }));
  change.observer.observe(text, { subtree: true, childList: true, attributeFilter: ["class"] });
  return change;
});
"""
OBSERVED = """
const changes = window.changes.map(({ tokens, elements }) => [[...tokens].sort((a, b) => a - b), elements]);
window.changes.forEach((change) => change.tokens.clear());
return changes;
"""
FADES = (4, 32, 128)  # steps since a token was evicted, after which it fades further


def fading(times: NDArray[Any], step: int) -> NDArray[Any]:
    """How each token looks at a step: unread, held, or faded by one to four levels."""
    tokens, since = numpy.arange(len(times)), step - times
    faded = 2 + sum(since > steps for steps in FADES)
    return numpy.where(tokens > step, 0, numpy.where(since <= 0, 1, faded))


PLACE = "const { top, bottom } = document.querySelector('.now').getBoundingClientRect(); return [top, bottom]"


@pytest.mark.slow
def test_a_step_in_a_long_text_redraws_only_what_it_changes(visit: Visit) -> None:
    length, layers, random = 4096, 30, numpy.random.default_rng(0)

    def kept(heads: int) -> ChunkTrace:
        after = 1 + random.geometric(1 / 512, (layers, heads, length))
        times = numpy.minimum(numpy.arange(length) + after, length).astype(numpy.int32)
        return ChunkTrace(times, tuple(range(layers)), (512,) * layers)

    words = [" word", "ing", " the", ".", "\n", " considerable", " of", ","]
    tokens = [words[i] for i in random.integers(0, len(words), length)]
    traces = kept(1), kept(3)
    html = page("long", "long", tokens, [PolicyTrace("tova", 512, traces[0]), PolicyTrace("h2o", 512, traces[1])])
    assert len(html.encode()) < 5e6
    browser = visit(html, "#step=3000&layer=20&head=0")
    move(browser, "step", 3000)  # the first move fades evicted tokens
    browser.execute_script(OBSERVE)
    for step in range(3001, 3016):
        move(browser, "step", step)
        looks = [[fading(one.evicted_at[20, 0], n) for n in (step - 1, step)] for one in traces]
        changed = [{*numpy.flatnonzero(before != after).tolist(), step - 1, step} for before, after in looks]
        assert browser.execute_script(OBSERVED) == [[sorted(tokens), 0] for tokens in changed]
        assert max(map(len, changed)) < 100  # of 4,096: a step redraws what it changes
    for layer in range(5, 20):
        move(browser, "layer", layer)
        assert [elements for _, elements in browser.execute_script(OBSERVED)] == [0, 0]
    for step in (4000, 5):
        move(browser, "step", step)
        for _ in range(3):
            settle(browser)
        top, bottom = browser.execute_script(PLACE)
        assert 0 < top < bottom < 800  # the text follows the step


UNDERLINED = """
const spans = [...document.querySelectorAll(".text span")];
return spans.map((span) => getComputedStyle(span).textDecorationLine === "underline");
"""


@pytest.mark.parametrize("protect", [0, 3])
def test_protected_tokens_are_underlined(protect: int, visit: Visit) -> None:
    browser = visit(page("hand", "by hand", TOKENS, TWO[:1], protect))
    assert browser.execute_script(UNDERLINED) == [token < protect for token in range(LENGTH)]
    legend = browser.execute_script("return document.getElementById('legend').getAttribute('aria-label')")
    assert legend.endswith("underlined: protected") == bool(protect)
    for token in (1, 4):
        browser = visit(page("hand", "by hand", TOKENS, TWO[:1], protect), where=f"#token={token}")
        assert text(browser, "#token-card h3").endswith("protected") == (token < protect)


OUTLINED = """
const spans = [...document.querySelectorAll(".text span")];
return spans.map((span) => getComputedStyle(span).outlineStyle === "solid");
"""


def test_recalled_tokens_are_outlined(visit: Visit) -> None:
    """Blocks of three steps: layer 0 recalls tokens 0 and 1 for the second, layer 1 token 3 for the third."""
    recalled = numpy.zeros((3, 2, LENGTH), dtype=bool)
    recalled[1, 0, :2] = recalled[2, 1, 3] = True
    trace = traced(WINDOW, SINK)._replace(recalled=recalled)
    browser = visit(page("hand", "by hand", TOKENS, [PolicyTrace("tova", SIZE, trace)], every=3))
    expected = {-1: [{0, 1}, {3}], 0: [{0, 1}, set()], 1: [set(), {3}]}
    for layer, (second, third) in expected.items():
        move(browser, "layer", layer)
        for step, outlined in ((2, set()), (3, second), (5, second), (6, third)):
            move(browser, "step", step)
            assert {i for i, is_so in enumerate(browser.execute_script(OUTLINED)) if is_so} == outlined
    move(browser, "layer", -1)
    assert "recalls 1" in text(browser, ".stats")  # a half of the layers, rounded
