"""The chat page in a real browser, with a real server: what it shows is what the server's states hold."""

from __future__ import annotations

import re
import time

import httpx
import pytest

import msrnn
from msrnn.hf.loading import Loaded
from msrnn.server.limits import Limits
from tests.helpers.live_server import KEY, live, running, slow_down
from tests.helpers.page_browser import (
    Visit,
    check_tokens,
    held,
    idle,
    recorded,
    say,
    set_settings,
    text,
    type_message,
    until,
    wait_idle,
)

HOSTILE = "<img src=x onerror='hacked=1'></script><script>hacked=1</script>&lt;b&gt; {{script}} a\u202eb"


def test_an_answer_streams_and_tokens_fade(
    visit: Visit, open_address: str, engine: msrnn.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = slow_down(engine, monkeypatch, 0.5)
    browser = visit(open_address)
    set_settings(browser, max_tokens=40, temperature=1, seed=3, system="Be naïve 🌊.")
    assert "0 of 16 KV rows" in text(browser, "#use")
    type_message(browser, "I am Ann from Tromsø.")
    lengths, faded, gauges = set(), set(), set()
    while browser.execute_script("return document.querySelector('.assistant') === null"):
        time.sleep(0.01)
    while not browser.execute_script("return document.getElementById('stop').hidden"):
        fast.set()
        fast.clear()  # one step more
        lengths.add(browser.execute_script("return document.querySelectorAll('.assistant .body span').length"))
        faded.add(browser.execute_script("return document.querySelectorAll('.conversation .s0').length"))
        gauges.add(text(browser, "#seen"))
        time.sleep(0.01)  # the browser and the server need the processor, too
    fast.set()
    assert min(len(lengths), len(faded), len(gauges)) > 5  # all of it while the answer was generated
    idle(browser)
    tokens = check_tokens(open_address, browser)
    assert browser.execute_script("return document.getElementById('gauge').getAttribute('aria-valuenow')") == "16"
    assert text(browser, "#seen") == str(held(open_address, browser)["seen"])
    assert text(browser, ".system .body") == "Be naïve 🌊."
    assert text(browser, ".user .body") == "I am Ann from Tromsø."
    assert "Cut at 40 tokens." in text(browser, ".note")
    say(browser, "Who am I?")
    more = check_tokens(open_address, browser)
    assert [token[:2] for token in more[: len(tokens)]] == [token[:2] for token in tokens]
    assert text(browser, ".turn:last-child .user .body") == "Who am I?"


def test_protected_tokens_are_marked(visit: Visit, open_address: str, engine: msrnn.Engine) -> None:
    browser = visit(open_address)
    set_settings(browser, max_tokens=20, temperature=1, seed=3, system="Hi.", protect="The system message")
    say(browser, "Who are you, and who am I?")
    say(browser, "Why?")
    check_tokens(open_address, browser)
    [[begin, end]] = held(open_address, browser)["protected"]
    assert begin == 0
    assert set(range(end)) <= {position for position, share in held(open_address, browser)["held"] if share == 1}
    marked = browser.execute_script("return [...document.querySelectorAll('.system .safe')].map(n => n.textContent)")
    assert "".join(marked) == "Hi."
    set_settings(browser, protect="Nothing")
    say(browser, "And now?")
    assert held(open_address, browser)["protected"] == []
    assert browser.execute_script("return document.querySelectorAll('.safe').length") == 0


def test_recalled_tokens_have_an_outline(visit: Visit, rnn: msrnn.MultiStateRNN, small: Loaded) -> None:
    recalling = msrnn.MultiStateRNN(rnn.model, "tova", 16, recall=4)
    with running(msrnn.Engine(recalling, slots=1, tokenizer=small.tokenizer), Limits()) as address:
        browser = visit(address)
        set_settings(browser, max_tokens=10, temperature=1, seed=3)
        say(browser, "Who are you, and who am I? Answer in as many words as there are in this question.")
        check_tokens(address, browser)
        recalled = {position for position, share in held(address, browser)["recalled"] if share > 0}
        script = (
            "return [...document.querySelectorAll('.back')].filter((n) => n.token).flatMap((n) => n.token.positions)"
        )
        outlined = browser.execute_script(script)
        assert outlined
        assert set(outlined) == recalled
        assert not browser.execute_script("return document.getElementById('legend-recall').hidden")


@pytest.mark.parametrize(
    ("stated", "used", "shown", "whose"),
    [
        ({"temperature": 1.0, "top_p": 0.8}, (1.0, 0.8), ["1", "0.8"], "1 (from the model), top-p 0.8"),
        ({}, (0.7, 1.0), ["0.7", "1"], "0.7 (of this page, since the model states none), top-p 1"),
    ],
    ids=["stated", "not-stated"],
)
def test_empty_fields_have_the_defaults_of_the_server(
    stated: dict[str, float],
    used: tuple[float, float],
    shown: list[str],
    whose: str,
    visit: Visit,
    engine: msrnn.Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The page has a temperature of its own only where the model states none."""
    requests = recorded(engine, monkeypatch)
    with live(engine, Limits(), defaults=stated) as found:
        browser = visit(found.address)
        fields = "['temperature', 'top_p', 'max_tokens'].map((name) => document.querySelector(`[name=${name}]`))"
        assert browser.execute_script(f"return {fields}.map(({{ value }}) => value)") == ["", "", ""]
        placeholders = browser.execute_script(f"return {fields}.map(({{ placeholder }}) => placeholder)")
        assert placeholders == [*shown, "16"]
        assert f"temperature {whose}, 16 tokens" in text(browser, "#server")
        set_settings(browser, max_tokens=2)
        say(browser, "One")
    (request,) = requests
    assert (request.params.temperature, request.params.top_p) == used


@pytest.mark.slow
def test_settings_reach_the_server(
    visit: Visit, open_address: str, engine: msrnn.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = recorded(engine, monkeypatch)
    browser = visit(open_address)
    assert "policy tova · 16 KV rows" in text(browser, "#about")
    assert "tova" in text(browser, "#server")
    set_settings(browser, temperature=0.25, top_p=0.5, max_tokens=3, seed=11, system="Be brief.")
    say(browser, "One")
    set_settings(browser, temperature="", seed="")
    say(browser, "Two")
    first, second = requests
    assert (first.params.temperature, first.params.top_p, first.params.max_tokens) == (0.25, 0.5, 3)
    assert (first.params.seed, second.params.seed, second.params.temperature) == (11, None, 0.7)
    assert "Be brief." in engine.tokenizer.decode(first.prompt)
    assert "Be brief." not in engine.tokenizer.decode(second.prompt)
    assert first.session is not None
    assert first.session == second.session
    assert first.session.name == browser.execute_script("return location.hash.slice(1)")


def test_hostile_text_stays_text(visit: Visit, open_address: str) -> None:
    browser = visit(open_address)
    set_settings(browser, max_tokens=3, system=HOSTILE)
    say(browser, HOSTILE)
    shown = HOSTILE.replace("\u202e", "[U+202E]")
    for selector in (".user .body", ".system .body", "#list .current b"):
        assert text(browser, selector) == shown
    browser.refresh()
    until(browser, "document.querySelector('.user .body')")
    assert text(browser, ".user .body") == shown
    assert browser.execute_script("return [document.images.length, document.scripts.length, typeof hacked]") == [
        *(0, 1, "undefined")
    ]


@pytest.mark.slow
def test_conversations(visit: Visit, open_address: str) -> None:
    """After a reload, a fork, and a deletion; a session of another client has numbers and no text."""
    browser = visit(open_address)
    set_settings(browser, max_tokens=4, temperature=0)
    say(browser, "One and two")
    tokens, name = check_tokens(open_address, browser), browser.execute_script("return location.hash")
    browser.refresh()
    until(browser, "document.querySelector('.user .body')")
    assert check_tokens(open_address, browser) == tokens
    browser.find_element("css selector", ".fork").click()
    until(browser, f"location.hash !== '{name}' && document.querySelectorAll('.turn').length === 1")
    assert check_tokens(open_address, browser) == tokens
    say(browser, "Three")
    check_tokens(open_address, browser)
    browser.execute_script("""
        const name = Object.keys(localStorage).find((name) => name.includes(location.hash.slice(1)));
        localStorage[name] = JSON.stringify({ ...JSON.parse(localStorage[name]), updated: 1 });
    """)
    browser.refresh()
    until(browser, "document.documentElement.dataset.ready")
    assert "2 turns were read elsewhere" in text(browser, "#log")  # a text of another session is not shown
    assert browser.find_elements("css selector", ".turn") == []
    body = {"prompt": "a", "max_tokens": 5, "session_id": "elsewhere"}
    httpx.post(f"{open_address}/v1/completions", json=body)
    browser.refresh()
    until(browser, "document.documentElement.dataset.ready")
    items = browser.find_elements("css selector", "#list .open")
    next(item for item in items if item.text.startswith("elsewhere")).click()
    until(browser, "location.hash === '#elsewhere'")
    assert "One turn was read elsewhere" in text(browser, "#log")
    assert text(browser, "#seen") == str(held(open_address, browser)["seen"])
    for wanted in ("Delete", "Delete for good?"):
        button = browser.find_element("css selector", ".delete")
        assert button.text == wanted
        button.click()
    until(browser, "document.querySelector('.welcome')")
    assert httpx.get(f"{open_address}/v1/sessions/elsewhere/memory").status_code == 404


def test_a_key(visit: Visit, address: str) -> None:
    browser = visit(address, errors=("401",))
    until(browser, "document.querySelector('dialog[open]')")
    assert text(browser, "#key-problem") == "The server wants a key."
    for key, problem in (("sk-wrong", "The server does not accept this key."), (KEY, "")):
        field = browser.find_element("css selector", "[name=key]")
        field.clear()
        field.send_keys(key, "\n")
        if problem:
            until(browser, f"document.getElementById('key-problem').textContent === {problem!r}")
    until(browser, "document.documentElement.dataset.ready")
    set_settings(browser, max_tokens=3)
    say(browser, "One")
    browser.refresh()
    until(browser, "document.querySelector('.user .body')")  # the key lasts as long as the tab
    assert KEY not in str(browser.execute_script("return JSON.stringify(localStorage)"))


@pytest.mark.slow
def test_a_server_that_is_busy(
    visit: Visit, rnn: msrnn.MultiStateRNN, small: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors are said in words, and the message can be sent again."""
    engine = msrnn.Engine(rnn, slots=1, tokenizer=small.tokenizer)
    slow_down(engine, monkeypatch)
    with running(engine, Limits(queue=1)) as address:
        browser = visit(address, errors=("429", "409", "ERR_CONNECTION_REFUSED"))
        set_settings(browser, max_tokens=3)
        say(browser, "One")
        name = browser.execute_script("return location.hash.slice(1)")
        body = {"prompt": "b", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json={**body, "session_id": name}, timeout=30) as busy:
            lines = busy.iter_lines()
            next(lines)
            for button in ("Delete", "Delete for good?"):
                until(browser, f"document.querySelector('.delete').textContent === {button!r}")
                browser.find_element("css selector", ".delete").click()
            until(browser, "document.getElementById('problem').innerText.includes('This conversation is busy.')")
            with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=30):
                type_message(browser, "Two")
                until(browser, "document.getElementById('problem').innerText.includes('too many requests wait')")
                assert "Try again in 1 s." in text(browser, "#problem")
                assert browser.find_element("id", "message").get_attribute("value") == "Two"
        wait_idle(engine)
        browser.find_element("id", "message").send_keys("\n")
        until(browser, "document.querySelectorAll('.turn:not(.lost)').length === 2")
        idle(browser)
        assert browser.execute_script("return document.getElementById('problem').hidden")
    type_message(browser, "Three")
    until(browser, "document.getElementById('problem').innerText.includes('The server cannot be reached.')")


@pytest.mark.slow  # another word for what `test_a_server_that_is_busy` sees
def test_another_client_of_the_session(
    visit: Visit, rnn: msrnn.MultiStateRNN, small: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = msrnn.Engine(rnn, slots=2, tokenizer=small.tokenizer)
    slow_down(engine, monkeypatch)
    with running(engine, Limits()) as address:
        browser = visit(address)
        set_settings(browser, max_tokens=3)
        say(browser, "One")
        name = browser.execute_script("return location.hash.slice(1)")
        body = {"prompt": "b", "max_tokens": 1000, "ignore_eos": True, "stream": True, "session_id": name}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=30) as busy:
            lines = busy.iter_lines()  # if nothing held it, the connection would be closed
            next(lines)
            type_message(browser, "Two")
            until(browser, "document.getElementById('problem').innerText.includes('answering another request')")


@pytest.mark.slow
@pytest.mark.parametrize("dark", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_phone_and_the_dark(visit: Visit, open_address: str, dark: bool) -> None:
    """Nothing is wider than the screen, and everything can be reached."""
    browser = visit(open_address, width=390, dark=dark)
    fits = "return document.documentElement.scrollWidth <= 390 && document.getElementById('log').scrollWidth <= 390"
    set_settings(browser, max_tokens=4)
    say(browser, "x" * 300 + " <b>")
    assert browser.execute_script(fits)
    visible = browser.find_element
    assert not visible("id", "details").is_displayed()
    visible("id", "unfold").click()
    assert visible("id", "map").is_displayed()
    assert browser.execute_script(fits)
    visible("id", "unfold").click()
    visible("id", "open-list").click()
    until(browser, "getComputedStyle(document.getElementById('conversations')).translate === '0px'")
    assert visible("id", "new").is_displayed()
    visible("id", "new").click()
    until(browser, "document.querySelector('.welcome')")
    visible("id", "open-settings").click()
    assert visible("name", "seed").is_displayed()
    assert browser.execute_script(fits)
    colour = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", colour)[:3])) < 150) is dark


@pytest.mark.slow
def test_a_keyboard_and_a_screen_reader(visit: Visit, open_address: str) -> None:
    browser = visit(open_address)
    set_settings(browser, max_tokens=4)
    say(browser, "One")
    assert text(browser, "#status").startswith("Answer: ")
    unnamed = browser.execute_script("""
        const named = (one) => one.ariaLabel || one.labels?.length || one.textContent.trim();
        const controls = [...document.querySelectorAll("button, input, textarea")];
        return controls.filter((one) => !named(one)).map((one) => one.outerHTML);
    """)
    assert unnamed == []
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-reduced-motion", "value": "reduce"}]}
    )
    assert (
        browser.execute_script("return getComputedStyle(document.querySelector('.body span')).transitionDuration")
        == "0s"
    )


def test_nothing_else_may_be_loaded(open_address: str) -> None:
    answer = httpx.get(open_address)
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "https://"):
        assert word not in answer.text
