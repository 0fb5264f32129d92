"""Requests with a size of their own, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from transformers import PreTrainedModel

import msrnn
from tests.helpers.characters import character_model, character_tokenizer
from tests.helpers.live_server import post, running

TEXT = "the cat sat on the mat, and the dog ran after it over the hill and far away"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return character_model()


def make_engine(model: PreTrainedModel, size: Any) -> msrnn.Engine:
    return msrnn.Engine(msrnn.MultiStateRNN(model, "echo", size), slots=3, tokenizer=character_tokenizer())


@pytest.fixture(scope="module")
def address(model: PreTrainedModel) -> Iterator[str]:
    with running(make_engine(model, 24)) as found:
        yield found


def complete(address: str, text: str = TEXT, **fields: Any) -> httpx.Response:
    body = {"prompt": text, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields}
    return post(address, body)


def answer(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def check_refused(response: httpx.Response, words: str) -> None:
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "size"
    assert words in error["message"]


def test_the_answer_is_that_of_a_server_of_the_size(model: PreTrainedModel, address: str) -> None:
    with running(make_engine(model, 8)) as small:
        expected = answer(complete(small))
    assert answer(complete(address, size=8)) == expected
    assert answer(complete(address, size=24)) == answer(complete(address))
    assert answer(complete(address)) != expected, "a text whose answer does not depend on the size shows nothing"


@pytest.mark.parametrize(
    ("size", "words"), [(25, "at most 24"), (0, "1"), (-1, "1"), (1.5, "size"), ("9", "size"), (True, "size")]
)
def test_other_sizes_are_refused(size: Any, words: str, address: str) -> None:
    check_refused(complete(address, size=size), words)


def test_a_session_keeps_its_size(address: str) -> None:
    answer(complete(address, session_id="talk", size=8))
    check_refused(complete(address, "more", session_id="talk", size=9), "session 'talk' has size 8")
    answer(complete(address, "more", session_id="talk"))
    answer(complete(address, "more", session_id="talk", size=8))
    answer(complete(address, session_id="whole"))
    check_refused(complete(address, "more", session_id="whole", size=8), "session 'whole' has size 24")


def test_a_prompt_is_protected_within_its_size(address: str) -> None:
    answer(complete(address, "hello you", protect="prompt"))
    error = complete(address, "hello you", protect="prompt", size=8).json()["error"]
    assert "of 8 KV rows" in error["message"]


def test_a_conversation_of_responses_keeps_its_size(model: PreTrainedModel, address: str) -> None:
    body: dict[str, Any] = {"input": TEXT, "max_output_tokens": 12, "temperature": 0, "ignore_eos": True}

    def respond(at: str, **fields: Any) -> dict[str, Any]:
        response = post(at, {**body, **fields}, "/v1/responses")
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def read(response: dict[str, Any]) -> str:
        text: str = response["output"][0]["content"][0]["text"]
        return text

    with running(make_engine(model, 8)) as small:
        first = respond(small)
        second = respond(small, previous_response_id=first["id"])
    mine = respond(address, size=8)
    again = respond(address, previous_response_id=mine["id"])
    assert (read(mine), read(again)) == (read(first), read(second))
    check_refused(
        post(address, {**body, "size": 9, "previous_response_id": again["id"]}, "/v1/responses"), "has size 8"
    )


def test_layers_of_different_sizes_have_none_to_lower(model: PreTrainedModel) -> None:
    layers = model.config.num_hidden_layers
    with running(make_engine(model, [24, *[20] * (layers - 1)])) as address:
        check_refused(complete(address, size=8), "not one size")
