"""The field `retention`: every token's text is at the token's own position, turn after turn."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import msrnn
from msrnn.engine.requests import Event, Request, SamplingParams
from msrnn.engine.state_retention import retention_of
from msrnn.hf.chat_template import render
from msrnn.hf.loading import Loaded
from msrnn.hf.messages import locate_contents
from msrnn.server.retention import PromptTexts, RetentionField, prompt_texts
from tests.helpers.characters import character_tokenizer
from tests.helpers.live_server import KEY, post
from tests.helpers.step_orders import both_orders

pytestmark = both_orders

HEADERS = {"Authorization": f"Bearer {KEY}"}
SYSTEM = "Answer naïvely — in Tromsø 🌊."


@pytest.fixture
def requests(engine: msrnn.Engine, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The engine's requests as they are made."""
    made, found = engine.request, list[Request]()

    def recorded(*args: Any) -> Request:
        found.append(made(*args))
        return found[-1]

    monkeypatch.setattr(engine, "request", recorded)
    return found


def told(address: str, **body: Any) -> list[dict[str, Any]]:
    """The retention fields of a streamed answer."""
    ask = {"stream": True, "temperature": 0, **body}
    response = post(address, ask, "/v1/chat/completions")
    chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    return [chunk["choices"][0]["retention"] for chunk in chunks if "retention" in chunk["choices"][0]]


def test_a_conversation(
    address: str, rnn: msrnn.MultiStateRNN, small: Loaded, requests: list[Request], overlaps: bool
) -> None:
    """A system message, characters of several tokens, an answer that is cut, one that stops, and a turn after each."""
    tokenizer, end = small.tokenizer, small.tokenizer.eos_token_id
    asked = ["I am Ann from Tromsø, 東京 🌊!", "user", "assistant\nAnd naïve?", "  "]
    changes: list[dict[str, Any]] = [{}, {"logit_bias": {str(end): 100}}, {"retention": 1}, {}]
    pieces: dict[int, str] = {}
    shares: dict[int, float] = {}
    for turn, (text, change) in enumerate(zip(asked, changes, strict=True)):
        system = [{"role": "system", "content": SYSTEM}] if turn == 0 else []
        messages = [*system, {"role": "user", "content": text}]
        fields = told(
            address, **{"messages": messages, "session_id": "talk", "max_tokens": 7, "retention": 3, **change}
        )
        for field in fields:
            for position, piece in enumerate(field["pieces"], field["start"]):
                assert pieces.setdefault(position, piece) == piece
            if "held" in field:
                shares = dict(field["held"]) if field is fields[0] else {**shares, **dict(field["held"])}
        for message, span in zip(messages, fields[0]["messages"], strict=True):
            assert span["role"] == message["role"]
            # the tokenizer has one token for the template's line feed and two spaces
            expected = "\n  " if text == "  " else message["content"]
            assert "".join(pieces[at] for at in range(span["start"], span["stop"])) == expected
        first = requests[-1].answers[0].tokens[:1]
        assert fields[0]["answer"] == fields[0]["start"] + len(fields[0]["pieces"]) - len(first)
    assert requests[1].answers[0].tokens == []
    assert [len(request.answers[0].tokens) for request in requests] == [7, 0, 7, 7]

    ids: list[int] = []
    for turn, request in enumerate(requests):
        ids += [*request.prompt, *request.answers[0].tokens]
        if turn == 1:
            ids.append(end)  # the stop token, which the next turn reads first
    assert [*range(len(ids))] == sorted(pieces)
    assert "".join(pieces[at] for at in range(len(ids))) == tokenizer.decode(ids)
    alone = [tokenizer.decode([token]) for token in ids]
    whole = [at for at, text in enumerate(alone) if "\N{REPLACEMENT CHARACTER}" not in text]
    assert len(whole) > 60
    assert all(pieces[at].lstrip("\N{REPLACEMENT CHARACTER}") == alone[at] for at in whole)
    state = rnn.state()
    read = ids if overlaps else ids[:-1]  # the last token of an answer that is cut is read by a step that overlaps it
    rnn.read(torch.tensor([read]), state)
    memory = httpx.get(f"{address}/v1/sessions/talk/memory", headers=HEADERS).json()
    now = retention_of(state)
    assert {position: share for position, share in shares.items() if share} == dict(now.list_shares())
    assert [tuple(pair) for pair in memory.pop("held")] == now.list_shares()
    assert memory == {
        **{"id": "talk", "object": "session.memory", "tokens": len(ids), "turns": 4, "seen": now.seen},
        **{"slots": 2 * 16, "used": 2 * 16, "bytes": state.nbytes, "full_bytes": now.full_nbytes},
        "protected": [],
    }
    httpx.delete(f"{address}/v1/sessions/talk", headers=HEADERS)


def test_bad_values(address: str) -> None:
    for every, message in ((-1, "must be a whole number"), (True, "must be a whole number"), (1.5, "must be a whole")):
        found = post(address, {"prompt": "a", "stream": True, "retention": every})
        assert (found.status_code, found.json()["error"]["param"]) == (400, "retention")
        assert message in found.json()["error"]["message"]
    assert "needs stream: true" in post(address, {"prompt": "a", "retention": 1}).json()["error"]["message"]
    assert httpx.get(f"{address}/v1/sessions/nobody/memory", headers=HEADERS).status_code == 404
    assert httpx.get(f"{address}/v1/sessions/nobody/memory").status_code == 401


def test_completions_have_it_for_every_choice(address: str) -> None:
    body = {"prompt": ["The sea", "A"], "n": 2, "max_tokens": 3, "stream": True, "retention": 2, "temperature": 0}
    choices: dict[int, list[str]] = {}
    for line in post(address, body).text.split("\n\n"):
        if line.startswith("data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            choices.setdefault(choice["index"], []).extend(choice["retention"]["pieces"])
    assert [choices[index][: 5 - 3 if index < 2 else 1] for index in range(4)] == [*[["The", " sea"]] * 2, *[["A"]] * 2]


def test_a_character_of_several_tokens(small: Loaded) -> None:
    """Its text comes with the last of its tokens, in prompts and in answers; a space that they begin with, at once."""
    ids = small.tokenizer("a 🌊 ø")["input_ids"]
    request = Request([1], SamplingParams())
    field = RetentionField(small.tokenizer, PromptTexts(4, ["x"], None))
    found = [field.build(Event(request, 0, token, "", None, None)) for token in ids]
    assert [one["start"] for one in found] == [4, *range(6, 5 + len(ids))]
    pieces = ["x", *prompt_texts(small.tokenizer, ids, 0).pieces]
    assert [piece for one in found for piece in one["pieces"]] == pieces
    assert pieces == ["x", "a", " ", "", "🌊", " ", "ø"]


@given(st.lists(st.sampled_from(["\N{REPLACEMENT CHARACTER}", "a", "🌊", "\n"]), max_size=60).map("".join))
def test_pieces_of_odd_texts(small: Loaded, text: str) -> None:
    """The tokenizer has many tokens for what is no character, and none of them waits for ever."""
    ids = small.tokenizer(text)["input_ids"]
    pieces = prompt_texts(small.tokenizer, ids, 0).pieces
    assert len(pieces) == len(ids)
    assert text.startswith("".join(pieces).rstrip("\N{REPLACEMENT CHARACTER}"))


def test_where_messages_are() -> None:
    """Also where the template has the same words, or strips them; a template that changes them says nothing."""
    tokenizer: Any = character_tokenizer()

    def spans(*contents: str) -> list[str] | None:
        messages = [{"role": role, "content": text} for role, text in zip(("system", "user"), contents, strict=True)]

        def rendered(some: list[dict[str, str]]) -> str:
            return render(tokenizer, some, prompt=True)

        found = locate_contents(messages, rendered)
        return None if found is None else [rendered(messages)[start:stop] for start, stop in found.spans]

    assert spans("system", "user>") == ["system", "user>"]
    assert spans("", "e") == ["", "e"]
    tokenizer.chat_template = tokenizer.chat_template.replace("m['content']", "m['content'] | trim")
    assert spans(" a ", "\nuser ") == ["a", "user"]
    tokenizer.chat_template = tokenizer.chat_template.replace("| trim", "| upper")
    assert spans("a", "b") is None
    ids = tokenizer("<s><system>A<end>", add_special_tokens=False)["input_ids"]
    one = [{"role": "system", "content": "a"}]
    found = prompt_texts(tokenizer, ids, 0, one, lambda some: render(tokenizer, some, prompt=False))
    assert found.messages is None
