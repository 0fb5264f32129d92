"""Texts on the chat page: the browser has the only copy, whatever happens to the sessions of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

import msrnn
from msrnn.hf.loading import Loaded
from msrnn.server.limits import Limits
from tests.helpers.live_server import running
from tests.helpers.page_browser import (
    Visit,
    box,
    check_tokens,
    click,
    in_problem,
    say,
    set_settings,
    text,
    type_message,
    until,
)

READY = "document.documentElement.dataset.ready"
MARK = "no longer on the server"


def kept_texts(browser: Any) -> int:
    script = "return Object.keys(localStorage).filter((name) => name.startsWith('msrnn text ')).length"
    return int(browser.execute_script(script))


def reload(browser: Any) -> None:
    browser.refresh()
    until(browser, READY)


def test_texts_outlive_a_restart_without_sessions(
    visit: Visit, rnn: msrnn.MultiStateRNN, small: Loaded, tmp_path: Path
) -> None:
    """They are marked, can be read, and are no ground for a new session; the mark goes when the session is back."""

    def started(folder: Path | None, port: int = 0) -> Any:
        return running(msrnn.Engine(rnn, slots=2, tokenizer=small.tokenizer, sessions=folder), Limits(), port)

    with started(tmp_path) as address:
        browser = visit(address, errors=("409",))
        set_settings(browser, max_tokens=4, temperature=0)
        say(browser, "One and two")
        answer = text(browser, ".assistant .body")
    port = int(address.rpartition(":")[2])
    with started(None, port):
        type_message(browser, "Three")  # the page does not know yet
        in_problem(browser, "The server no longer has this conversation")
        assert box(browser) == "Three"
        assert httpx.get(f"{address}/v1/sessions").json()["data"] == []
        reload(browser)
        assert text(browser, "#list .current.gone em") == MARK
        assert text(browser, "#list .current b") == "One and two"
        assert (text(browser, ".user .body"), text(browser, ".assistant .body")) == ("One and two", answer)
        assert browser.find_element("id", "gone").is_displayed()
        assert not browser.find_element("id", "send").is_enabled()
        type_message(browser, "Three")
        in_problem(browser, "Start a new conversation to send this message.")
        click(browser, "#start-new")
        until(browser, "document.querySelector('.welcome') && document.getElementById('gone').hidden")
        assert box(browser) == "Three"
        say(browser, "")
        assert text(browser, ".user .body") == "Three"
        assert kept_texts(browser) == 2
    with started(tmp_path, port):
        reload(browser)
        assert text(browser, "#list .gone b") == "Three"  # that one is gone now
        click(browser, "#list li:not(.gone) .open")
        until(browser, "document.querySelector('.user .body').textContent === 'One and two'")
        assert not browser.find_element("id", "gone").is_displayed()
        say(browser, "Four")
        assert len(browser.find_elements("css selector", ".turn:not(.lost)")) == 2
        check_tokens(address, browser)


def test_a_text_is_deleted_by_its_button_only(visit: Visit, open_address: str) -> None:
    browser = visit(open_address)
    set_settings(browser, max_tokens=4)
    for message in ("First", "Second", "Third"):
        click(browser, "#new")
        say(browser, message)
        name = browser.execute_script("return location.hash.slice(1)")
        httpx.delete(f"{open_address}/v1/sessions/{name}")
    reload(browser)
    marked = ".gone .open b"
    assert [item.text for item in browser.find_elements("css selector", marked)] == ["Third", "Second", "First"]
    click(browser, "#list .gone:nth-of-type(2) .open")
    until(browser, "document.querySelector('.user .body').textContent === 'Second'")
    for words in ("Delete text", "Delete for good?"):
        assert browser.find_element("css selector", "#list .delete").text == words
        click(browser, "#list .delete")
    until(browser, "document.querySelector('.welcome')")
    assert [item.text for item in browser.find_elements("css selector", marked)] == ["Third", "First"]
    assert kept_texts(browser) == 2
    click(browser, "#open-settings")
    click(browser, "[name=keep]")
    assert kept_texts(browser) == 2  # what is kept stays, until it is deleted
    click(browser, "#forget-all button")
    click(browser, "#forget-all button")
    assert kept_texts(browser) == 0
    click(browser, "#settings [type=submit]")
    assert browser.find_elements("css selector", marked) == []


def give_key(browser: Any, key: str) -> None:
    field = browser.find_element("css selector", "[name=key]")
    field.clear()
    field.send_keys(key, "\n")


def test_another_key_deletes_no_text(visit: Visit, rnn: msrnn.MultiStateRNN, small: Loaded) -> None:
    """The sessions of a key are not in the list of another one."""
    engine = msrnn.Engine(rnn, slots=2, tokenizer=small.tokenizer)
    with running(engine, Limits(keys=["sk-ann", "sk-bob"])) as address:
        browser = visit(address, errors=("401",))
        give_key(browser, "sk-ann")
        until(browser, READY)
        set_settings(browser, max_tokens=4)
        say(browser, "I am Ann")
        click(browser, "#open-settings")
        give_key(browser, "sk-bob")
        until(browser, f"document.querySelector('#list .current.gone em')?.textContent === '{MARK}'")
        assert text(browser, ".user .body") == "I am Ann"
        assert kept_texts(browser) == 1
        click(browser, "#open-settings")
        give_key(browser, "sk-ann")
        until(browser, "document.querySelector('#list .current:not(.gone)')")
        until(browser, "document.getElementById('gone').hidden")
        say(browser, "Who am I?")
        assert len(browser.find_elements("css selector", ".turn:not(.lost)")) == 2


def test_a_list_of_several_pages(visit: Visit, rnn: msrnn.MultiStateRNN, small: Loaded) -> None:
    """A session that is not on the first page of the list is not gone."""
    engine = msrnn.Engine(rnn, slots=2, tokenizer=small.tokenizer)
    with running(engine, Limits()) as address:
        browser = visit(address)
        set_settings(browser, max_tokens=4)
        say(browser, "Old")
        body = {"prompt": "a", "max_tokens": 1, "session_id": "source"}
        assert httpx.post(f"{address}/v1/completions", json=body).status_code == 200
        for number in range(1000):
            engine.sessions.fork("source", f"fork-{number}")
        reload(browser)
        assert browser.execute_script("return document.querySelectorAll('#list li').length") == 1002
        assert text(browser, "#list .current b") == "Old"
        assert browser.find_elements("css selector", "#list .gone") == []


@pytest.mark.slow
def test_another_session_of_the_same_name(visit: Visit, open_address: str) -> None:
    """It has its own text, and does not replace the old one."""
    browser = visit(open_address)
    set_settings(browser, max_tokens=4)
    say(browser, "Old")
    name = browser.execute_script("return location.hash.slice(1)")
    httpx.delete(f"{open_address}/v1/sessions/{name}")
    body = {"prompt": "a", "max_tokens": 5, "session_id": name}
    httpx.post(f"{open_address}/v1/completions", json=body)
    reload(browser)
    assert "One turn was read elsewhere" in text(browser, "#log")
    say(browser, "New")
    assert kept_texts(browser) == 2
    assert text(browser, "#list .gone b") == "Old"
    click(browser, "#list .gone .open")
    until(browser, "document.querySelector('.user .body').textContent === 'Old'")
