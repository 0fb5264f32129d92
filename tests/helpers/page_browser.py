"""The chat page in a browser, and what a reader can see on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx

import msrnn
from msrnn.engine.requests import Request

Visit = Callable[..., Any]  # opens the page of a server in a browser, which it returns

# Every token that is shown: its text, the positions that it stands for, its classes.
TOKENS = """
return [...document.querySelectorAll(".turn:not(.lost) .body span, .turn:not(.lost) .tick")]
  .map(({ token, className }) => [token.text, token.positions, className]);
"""


def until(browser: Any, script: str, seconds: float = 60) -> Any:
    """Wait until a script returns something that is true. The first answer of a fresh clone compiles kernels."""
    end = time.monotonic() + seconds
    while not (found := browser.execute_script(f"return {script}")):
        assert time.monotonic() < end, f"{script}\n{browser.execute_script('return document.body.innerText')}"
        time.sleep(0.02)
    return found


def idle(browser: Any) -> None:
    """Until an answer is finished and the list is up to date; the page is busy as soon as a message is sent."""
    until(browser, "document.getElementById('log').getAttribute('aria-busy') === 'false'")


def type_message(browser: Any, text: str) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.find_element("id", "message").send_keys(text, Keys.ENTER)


def say(browser: Any, text: str) -> None:
    """Send a message and wait for the end of the answer."""
    turns = browser.execute_script("return document.querySelectorAll('.turn').length")
    type_message(browser, text)
    until(browser, f"document.querySelectorAll('.turn').length > {turns}")
    idle(browser)


def box(browser: Any) -> str:
    """What is in the box for messages."""
    return str(browser.execute_script("return document.getElementById('message').value"))


def in_problem(browser: Any, words: str) -> None:
    """Until the page reports a problem with these words."""
    until(browser, f"document.getElementById('problem').innerText.includes({words!r})")


def click(browser: Any, selector: str) -> None:
    browser.find_element("css selector", selector).click()


def set_settings(browser: Any, **values: object) -> None:
    browser.find_element("id", "open-settings").click()
    for name, value in values.items():
        field = browser.find_element("css selector", f"#settings [name={name}]")
        if field.tag_name != "select":
            field.clear()
        field.send_keys(str(value))
    browser.find_element("css selector", "#settings [type=submit]").click()


def text(browser: Any, selector: str) -> str:
    return str(browser.execute_script("return document.querySelector(arguments[0]).textContent", selector))


def level(share: float) -> int:
    """The class of a token that this share of the layers holds, s0 to s8."""
    return 0 if share <= 0 else max(1, int(share * 8 + 0.5))


def wait_idle(engine: msrnn.Engine) -> None:
    end = time.monotonic() + 20
    while not engine.idle:
        assert time.monotonic() < end
        time.sleep(0.01)


def recorded(engine: msrnn.Engine, monkeypatch: Any) -> list[Request]:
    """The engine's requests as they are made."""
    made, found = engine.request, list[Request]()

    def request(*args: Any) -> Request:
        found.append(made(*args))
        return found[-1]

    monkeypatch.setattr(engine, "request", request)
    return found


def held(address: str, browser: Any) -> dict[str, Any]:
    """What the server says of the session that is shown."""
    name = browser.execute_script("return location.hash.slice(1)")
    memory: dict[str, Any] = httpx.get(f"{address}/v1/sessions/{name}/memory").json()
    return memory


def check_tokens(address: str, browser: Any, size: int = 16) -> list[Any]:
    """Every position is shown once, in order, faded by what the server's state holds of it."""
    memory, tokens = held(address, browser), browser.execute_script(TOKENS)
    shares, recalled = dict(memory["held"]), dict(memory.get("recalled", []))
    positions = sorted(position for _, some, _ in tokens for position in some)
    assert positions == [*range(len(positions))]
    assert len(positions) in (memory["tokens"], memory["tokens"] - 1)  # a stop token is shown with the next turn
    for _, some, classes in tokens:
        read = [position for position in some if position < memory["seen"]]
        if read:
            share = sum(shares.get(position, 0) for position in read) / len(read)
            old = share > 0 and some[-1] < memory["seen"] - size
            safe = share > 0 and any(begin <= some[0] < end for begin, end in memory["protected"])
            back = any(position in recalled for position in some)
            expected = [f"s{level(share)}", *["old"] * old, *["safe"] * safe, *["back"] * back]
            assert [name for name in classes.split() if name != "tick"] == expected
    return tokens
