"""Turns on the chat page: an answer that is stopped is kept, a message that is lost comes back, an answer is copied."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

import msrnn
from tests.helpers.live_server import slow_down
from tests.helpers.page_browser import (
    Visit,
    box,
    check_tokens,
    click,
    held,
    idle,
    in_problem,
    recorded,
    say,
    set_settings,
    text,
    type_message,
    until,
    wait_idle,
)
from tests.helpers.step_orders import second_order_slow

pytestmark = second_order_slow

AT_END = "(({ scrollHeight, scrollTop, clientHeight }) => scrollHeight - scrollTop - clientHeight < 5)(log)"
ANSWERING = "document.querySelectorAll('.turn:last-child .assistant .body span').length > 5"


def press_escape(browser: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    ActionChains(browser).send_keys(Keys.ESCAPE).perform()


def press_stop(browser: Any) -> None:
    click(browser, "#stop")


def turns(address: str, browser: Any) -> int:
    """Finished turns of the session that is shown."""
    name = browser.execute_script("return location.hash.slice(1)")
    return int(httpx.get(f"{address}/v1/sessions/{name}").json()["turns"])


def break_after(engine: msrnn.Engine, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Let a decode step fail, once, after some that do not."""
    step, left = engine.executor.step, iter(range(steps))

    def breaking(samplers: Any) -> Any:
        if next(left, None) is None:
            monkeypatch.setattr(engine.executor, "step", step)
            raise RuntimeError("broken for a test")
        return step(samplers)

    monkeypatch.setattr(engine.executor, "step", breaking)


@pytest.fixture
def held_up(engine: msrnn.Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Prompts are not read until this is called."""
    go_on, read = threading.Event(), engine.queue.read_chunk

    def wait(*args: Any) -> Any:
        assert go_on.wait(30)
        return read(*args)

    monkeypatch.setattr(engine.queue, "read_chunk", wait)
    return go_on.set


def test_stop_keeps_the_turn(
    visit: Visit, open_address: str, engine: msrnn.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = visit(open_address)
    set_settings(browser, max_tokens=1000, temperature=1, seed=1)
    slow_down(engine, monkeypatch)
    for count, stop in enumerate((press_escape, press_stop), 1):
        type_message(browser, f"Number {count}")
        until(browser, ANSWERING)
        stop(browser)
        idle(browser)
        assert len(browser.find_elements("css selector", ".turn:not(.lost)")) == count
        shown = browser.execute_script("return document.querySelectorAll('.turn')[arguments[0]].view.text", count - 1)
        assert shown != ""
        assert text(browser, ".turn:last-child .note").startswith("Stopped at ")
        assert turns(open_address, browser) == count
        assert box(browser) == ""
        assert len(check_tokens(open_address, browser)) < 500
    wait_idle(engine)
    set_settings(browser, max_tokens=5)
    say(browser, "Three")
    check_tokens(open_address, browser)
    assert turns(open_address, browser) == 3
    browser.refresh()
    until(browser, "document.querySelectorAll('.turn').length === 3")
    assert text(browser, ".turn:nth-child(2) .note").startswith("Stopped at ")


def test_a_message_that_is_stopped_before_its_answer_comes_back(
    visit: Visit, open_address: str, engine: msrnn.Engine, held_up: Callable[[], None]
) -> None:
    browser = visit(open_address)
    for typed, expected in (("", "One"), ("and then", "One\n\nand then")):
        browser.execute_script("document.getElementById('message').value = ''")
        type_message(browser, "One")
        until(browser, "document.querySelector('.turn .note')?.textContent === 'reading …'")
        browser.find_element("id", "message").send_keys(typed)
        press_escape(browser)
        idle(browser)
        assert text(browser, ".welcome h2")
        assert box(browser) == expected
        assert text(browser, "#status") == "The message is back in the box."
    held_up()
    wait_idle(engine)
    assert browser.execute_script("return location.hash") == ""  # the server has no such session


def test_a_lost_message_comes_back_and_is_retried(
    visit: Visit, open_address: str, engine: msrnn.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its system message, if the first turn was lost; what is typed meanwhile stays."""
    browser = visit(open_address, width=390)
    set_settings(browser, max_tokens=12, temperature=0, system="Be brief.")
    for count in (1, 2):
        break_after(engine, monkeypatch, 8)
        type_message(browser, f"Number {count}")
        in_problem(browser, "internal error")
        until(browser, "document.querySelector('.turn.lost')")
        assert box(browser) == f"Number {count}"
        assert "This turn is not remembered." in text(browser, ".turn.lost .note")
        until(browser, AT_END)
        browser.find_element("id", "message").send_keys("!")
        click(browser, ".turn.lost .retry")
        idle(browser)
        assert browser.find_elements("css selector", ".turn.lost") == []  # the new answer takes its place
        assert box(browser) == "!"
        assert turns(open_address, browser) == count
        check_tokens(open_address, browser)
        browser.execute_script("document.getElementById('message').value = ''")
    assert text(browser, ".system .body") == "Be brief."
    assert not browser.find_element("css selector", ".turn:last-child .retry").is_displayed()


def test_a_turn_that_the_server_cannot_stop(
    visit: Visit, open_address: str, engine: msrnn.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page closes the stream, and says that the turn is lost."""
    browser = visit(open_address, errors=("404",))
    set_settings(browser, max_tokens=1000)
    slow_down(engine, monkeypatch)
    monkeypatch.setattr(engine, "stop_session", lambda _: False)
    type_message(browser, "One")
    until(browser, ANSWERING)
    press_stop(browser)
    in_problem(browser, "the server could not keep it")
    assert text(browser, ".turn.lost .note") == "Stopped: this turn is not remembered."
    assert box(browser) == "One"
    wait_idle(engine)  # the row is free


def test_a_conversation_that_goes_on_elsewhere(visit: Visit, open_address: str) -> None:
    """The message is not sent below a text that has missed turns."""
    browser = visit(open_address, errors=("409",))
    set_settings(browser, max_tokens=4, temperature=0)
    say(browser, "One")
    name = browser.execute_script("return location.hash.slice(1)")
    httpx.post(f"{open_address}/v1/completions", json={"prompt": "a", "max_tokens": 5, "session_id": name})
    type_message(browser, "Two")
    in_problem(browser, "has gone on without this page")
    until(browser, "document.getElementById('log').innerText.includes('One turn was read elsewhere')")
    assert (box(browser), turns(open_address, browser)) == ("Two", 2)
    type_message(browser, "")
    idle(browser)
    assert turns(open_address, browser) == 3


@pytest.mark.parametrize("secure", [True, False])
def test_an_answer_is_copied(visit: Visit, open_address: str, secure: bool) -> None:
    """Also where the clipboard's interface is missing, as for pages over HTTP from another machine."""
    from selenium.webdriver.common.keys import Keys

    browser = visit(open_address)
    permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    browser.execute_cdp_cmd("Browser.grantPermissions", {"origin": open_address, "permissions": permissions})
    set_settings(browser, max_tokens=12, temperature=1, seed=4)
    say(browser, "One")
    if secure:
        browser.execute_script("document.execCommand = () => false")
    else:
        browser.execute_script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    code = "def f(x):\n\treturn x  # <b>&amp;\n"
    browser.execute_script("document.querySelector('.turn').view.turn.pieces.push(arguments[0])", code)
    answer = browser.execute_script("return document.querySelector('.turn').view.text")
    assert answer.endswith(code)
    button = browser.find_element("css selector", ".copy")
    button.send_keys(Keys.ENTER)  # by keyboard
    until(browser, "document.querySelector('.copy').textContent === 'Copied'")
    assert browser.execute_script("return document.activeElement.className") == "copy"
    browser.find_element("id", "message").send_keys(Keys.CONTROL, "v")
    until(browser, "document.getElementById('message').value")
    assert box(browser) == answer


def test_a_conversation_keeps_the_size_of_its_beginning(
    visit: Visit, open_address: str, engine: msrnn.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server refuses another one later, so the page sends it once."""
    requests = recorded(engine, monkeypatch)
    browser = visit(open_address)
    assert browser.execute_script("return document.querySelector('[name=size]').max") == "16"
    set_settings(browser, max_tokens=4, size=9)
    say(browser, "I am Ann")
    set_settings(browser, size=12)
    say(browser, "Who am I?")
    assert [request.size for request in requests] == [9, 9]
    assert browser.execute_script("return document.querySelectorAll('.turn:not(.lost)').length") == 2
    assert held(open_address, browser)["slots"] == 2 * 9
