"""Sessions over HTTP: a conversation is what the chat template makes of all its messages; conflicts; pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from starlette.datastructures import QueryParams

import msrnn
from msrnn.hf.loading import Loaded
from msrnn.server.errors import ApiError
from msrnn.server.sessions import page_of
from tests.helpers.live_server import KEY, post, running, slow_down
from tests.helpers.step_orders import both_orders

pytestmark = both_orders

HEADERS = {"Authorization": f"Bearer {KEY}"}


def test_a_stop_token_is_read_once(address: str, rnn: msrnn.MultiStateRNN, small: Loaded) -> None:
    """Whether or not the row had read it when the answer ended."""
    tokenizer = small.tokenizer
    messages = [{"role": "user", "content": "Say nothing."}]
    for text in ("Nothing?", "Really nothing?"):
        body = {"messages": messages[-1:], "session_id": "quiet", "max_tokens": 8}
        ended = post(address, {**body, "logit_bias": {tokenizer.eos_token_id: 100}}, "/v1/chat/completions").json()
        assert (ended["choices"][0]["message"]["content"], ended["choices"][0]["finish_reason"]) == ("", "stop")
        messages += [{"role": "assistant", "content": ""}, {"role": "user", "content": text}]
    body = {"messages": messages[-1:], "session_id": "quiet", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    found = post(address, body, "/v1/chat/completions").json()["choices"][0]["message"]["content"]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    expected = rnn.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    assert found == tokenizer.decode(expected, skip_special_tokens=True)


def test_a_fork_to_a_session_whose_first_turn_is_under_way(
    address: str, engine: msrnn.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert post(address, {"prompt": "a", "session_id": "one", "max_tokens": 2}).status_code == 200
    slow_down(engine, monkeypatch)
    body = {"prompt": "b", "max_tokens": 1500, "ignore_eos": True, "session_id": "two", "stream": True}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, headers=HEADERS, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        found = httpx.post(f"{address}/v1/sessions/one/fork", json={"to": "two"}, headers=HEADERS)
        assert (found.status_code, found.json()["error"]["code"]) == (409, "session_error")
        assert httpx.post(f"{address}/v1/sessions/two/stop", headers=HEADERS).json()["stopped"]
        assert sum('"finish_reason": "stop"' in line for line in lines) == 1
    assert httpx.get(f"{address}/v1/sessions/two", headers=HEADERS).json()["turns"] == 1


def test_the_list_has_pages(address: str) -> None:
    for number in range(5):
        post(address, {"prompt": "a", "session_id": f"page{number}", "max_tokens": 1})
    names: list[str] = []
    query: dict[str, Any] = {"limit": 2}
    while True:
        page = httpx.get(f"{address}/v1/sessions", params=query, headers=HEADERS).json()
        names += [found["id"] for found in page["data"]]
        if not page["has_more"]:
            break
        assert len(page["data"]) == 2
        query["after"] = names[-1]
    assert [name for name in names if name.startswith("page")] == [f"page{number}" for number in range(4, -1, -1)]
    assert len(set(names)) == len(names)
    for wrong in ({"limit": 0}, {"limit": 10**30}, {"limit": "x"}, {"limit": "²"}, {"after": "nobody"}):
        found = httpx.get(f"{address}/v1/sessions", params=wrong, headers=HEADERS)
        assert (found.status_code, found.json()["error"]["param"]) == (400, next(iter(wrong)))


def test_no_room_for_a_session(rnn: msrnn.MultiStateRNN, small: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before its prompt is read, and with a code of its own."""
    engine = msrnn.Engine(rnn, slots=2, tokenizer=small.tokenizer, session_bytes=rnn.state().nbytes)
    slow_down(engine, monkeypatch)
    with running(engine) as address:
        body = {"prompt": "b", "max_tokens": 1500, "ignore_eos": True, "session_id": "one", "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, headers=HEADERS, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            found = post(address, {"prompt": "a", "session_id": "two", "max_tokens": 1})
            assert (found.status_code, found.json()["error"]["code"]) == (507, "session_storage_full")
        metrics = httpx.get(f"{address}/metrics").text
    assert 'msrnn_sessions_evicted_total{limit="bytes"} 0.0' in metrics


@pytest.mark.parametrize("damage", ["truncated", "another model"])
def test_errors_do_not_tell_where_files_are(
    rnn: msrnn.MultiStateRNN, small: Loaded, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "of-the-server"
    first = msrnn.Engine(rnn, slots=2, tokenizer=small.tokenizer, sessions=folder)
    with running(first) as address:
        post(address, {"prompt": "a", "session_id": "talk", "max_tokens": 2})
    (path,) = folder.glob("*/*.safetensors")
    again = msrnn.Engine(rnn, slots=2, tokenizer=small.tokenizer, sessions=folder)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-30])
    else:
        other = msrnn.MultiStateRNN(rnn.model, "window", 16)
        again = msrnn.Engine(other, slots=2, tokenizer=small.tokenizer, sessions=folder)
    with running(again) as address:
        found = [
            post(address, {"prompt": "a", "session_id": "talk", "max_tokens": 2}),
            httpx.post(f"{address}/v1/sessions/talk/fork", json={"to": "other"}, headers=HEADERS),
            httpx.get(f"{address}/v1/sessions/talk/memory", headers=HEADERS),
        ]
    assert [reply.status_code for reply in found] == [409, 409, 409]
    assert not any("of-the-server" in reply.text for reply in found)


SESSIONS: list[dict[str, Any]] = [{"id": f"s{number}"} for number in range(5)]


@pytest.mark.parametrize(
    ("query", "names", "more"),
    [
        ({}, ["s0", "s1", "s2", "s3", "s4"], False),
        ({"limit": "2"}, ["s0", "s1"], True),
        ({"limit": "2", "after": "s1"}, ["s2", "s3"], True),
        ({"limit": "2", "after": "s3"}, ["s4"], False),
        ({"after": "s4"}, [], False),
    ],
)
def test_a_page_of_a_list(query: dict[str, str], names: list[str], more: bool) -> None:
    page = page_of(SESSIONS, QueryParams(query))
    assert ([found["id"] for found in page["data"]], page["has_more"], page["object"]) == (names, more, "list")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        *(({"limit": limit}, "limit") for limit in ("0", "1001", "-1", "1.5", "", "٣", "9" * 5000)),
        ({"after": "x"}, "after"),
    ],
)
def test_pages_that_are_refused(query: dict[str, str], param: str) -> None:
    with pytest.raises(ApiError) as error:
        page_of(SESSIONS, QueryParams(query))
    assert (error.value.status, error.value.param) == (400, param)
    assert len(error.value.message) < 300
