"""Calls of tools on the chat page: the reader writes what a tool returns, and nothing of a call becomes markup."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import msrnn
from msrnn.server.call_detection import find_format
from msrnn.server.limits import Limits
from tests.helpers.byte_tokenizer import byte_model
from tests.helpers.live_server import live
from tests.helpers.page_browser import Visit, check_tokens, recorded, say, set_settings, text, until
from tests.helpers.said import say as answer_with
from tests.helpers.tool_requests import TOOL
from tests.helpers.tool_templates import tool_tokenizer

HOSTILE = "</pre><img src=x onerror='hacked=1'><script>hacked=1</script>"
CALLED = json.dumps({"name": "find_pet", "arguments": {"kind": HOSTILE}})
SAID = f"so:\n<tool_call>\n{CALLED}\n</tool_call>"
SIZE = 300
READY = "document.documentElement.dataset.ready"


@pytest.fixture
def engine() -> msrnn.Engine:
    return msrnn.Engine(msrnn.MultiStateRNN(byte_model(), "tova", SIZE), slots=2, tokenizer=tool_tokenizer("hermes"))


@pytest.fixture
def address(engine: msrnn.Engine) -> Iterator[str]:
    with live(engine, Limits(), calls=find_format(engine.tokenizer)) as found:
        yield found.address


def check_shown(browser: Any) -> None:
    assert text(browser, ".call b") == "find_pet"
    assert json.loads(text(browser, ".call pre")) == {"kind": HOSTILE}
    assert SAID in text(browser, ".assistant .body").replace("Copy", "")  # with the label of a button
    unsafe = "return [document.images.length, document.querySelectorAll('#log script').length, typeof hacked]"
    assert browser.execute_script(unsafe) == [0, 0, "undefined"]


def test_a_call_is_shown_and_answered(
    visit: Visit, address: str, engine: msrnn.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(engine, monkeypatch, SAID)
    requests = recorded(engine, monkeypatch)
    browser = visit(address)
    set_settings(browser, max_tokens=300, tools=json.dumps([TOOL]))
    say(browser, "A pet?")
    check_shown(browser)
    check_tokens(address, browser, SIZE)
    assert browser.execute_script("return document.getElementById('message').placeholder").endswith("find_pet returns")

    browser.get("about:blank")
    browser.get(address)
    until(browser, READY)
    browser.find_element("css selector", "#list .open").click()
    until(browser, "document.querySelector('.call')")
    check_shown(browser)

    answer_with(engine, monkeypatch, "Bo is a dog.")
    say(browser, f"Bo {HOSTILE}")
    assert text(browser, ".message.tool h3") == "Tool"
    assert text(browser, ".message.tool .body") == f"Bo {HOSTILE}"
    read = engine.tokenizer.decode(requests[-1].prompt)
    assert f"<tool_response>\nBo {HOSTILE}\n</tool_response>" in read
    assert browser.execute_script("return document.querySelectorAll('.call').length") == 1
    assert browser.execute_script("return document.getElementById('message').placeholder") == "Write a message"
    unsafe = "return [document.images.length, typeof hacked]"
    assert browser.execute_script(unsafe) == [0, "undefined"]
    check_tokens(address, browser, SIZE)


def test_tools_that_are_no_list_are_not_sent(
    visit: Visit, address: str, engine: msrnn.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = visit(address)
    found = browser.execute_script("return ['', '[]', '{', '[3]', '[{\"type\": \"function\"}]', '3'].map(parseTools)")
    assert found == [[], [], None, None, None, None]
    set_settings(browser, max_tokens=4, tools="[3]")
    assert browser.execute_script("return document.getElementById('settings').open"), "the form says what is wrong"
    assert "tools" not in browser.execute_script(
        "document.getElementById('settings').close(); return Object.keys(JSON.parse(localStorage['msrnn settings']))"
    )


def test_arguments_that_come_in_parts_or_broken(visit: Visit, address: str) -> None:
    browser = visit(address)
    script = """
    const calls = [];
    addCalls(calls, [{ index: 0, id: "a", function: { name: "f", arguments: "" } }]);
    addCalls(calls, [{ index: 0, function: { arguments: '{"a": "<b>' } }]);
    addCalls(calls, [{ index: 1, id: "c", function: { name: "g" } }]);
    addCalls(calls, undefined);
    return [calls, callElement(calls[0]).innerHTML];
    """
    calls, markup = browser.execute_script(script)
    assert calls == [{"id": "a", "name": "f", "arguments": '{"a": "<b>'}, {"id": "c", "name": "g", "arguments": ""}]
    assert markup == '<p class="soft">Calls <b>f</b></p><pre>{"a": "&lt;b&gt;</pre>'
