"""A last message of the assistant is continued, and variables of the chat template are what the model reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest

import msrnn
from msrnn.server.limits import Limits
from msrnn.server.server import Server
from tests.helpers.characters import SPECIAL, THINKING, character_model, character_tokenizer
from tests.helpers.live_server import served_by

ASK: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
ASK["logit_bias"] = {str(special): -100 for special in range(len(SPECIAL))}  # an answer is what its text says
USER = {"role": "user", "content": "hi"}
BEGINNING = "<system>be kind<end>\n<user>hi<end>\n<model>"  # a prompt of text begins with <s> by itself
Ask = Callable[..., Coroutine[Any, Any, Any]]


def with_server(test: Callable[[Ask], Coroutine[Any, Any, None]]) -> None:
    """`ask(messages or prompt, **fields)` is the text of the answer, or its error."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = THINKING
    engine = msrnn.Engine(msrnn.MultiStateRNN(character_model(), "tova", 16), 4, tokenizer=tokenizer)

    async def run() -> None:
        transport = httpx.ASGITransport(Server(engine, served_by(engine), Limits()).app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:

            async def ask(prompt: Any, **fields: Any) -> Any:
                field, path = ("prompt", "completions") if isinstance(prompt, str) else ("messages", "chat/completions")
                found = (await client.post(f"/v1/{path}", json={**ASK, field: prompt, **fields})).json()
                if "error" in found:
                    return found["error"]
                choice = found["choices"][0]
                return choice["text"] if field == "prompt" else choice["message"]["content"]

            await test(ask)

    asyncio.run(run())
    engine.close()


def assistant(content: str) -> list[dict[str, str]]:
    return [USER, {"role": "assistant", "content": content}]


def test_a_message_is_continued_or_followed_by_a_new_one() -> None:
    async def test(ask: Ask) -> None:
        go_on = {"continue_final_message": True}
        ends = {
            "so": [{}, go_on, {**go_on, "add_generation_prompt": False}],
            "so<end>\n": [{"add_generation_prompt": False}],
            "so<end>\n<model>": [{"add_generation_prompt": True}, {"continue_final_message": False}],
        }
        expected = [await ask(BEGINNING + text) for text in ends]
        assert len({*expected}) == 3
        for text, ways in zip(expected, ends.values(), strict=True):
            for fields in ways:
                assert await ask(assistant("so"), **fields) == text, fields
        error = await ask([USER], continue_final_message=True)
        assert (error["param"], error["code"]) == ("continue_final_message", "invalid_value")

    with_server(test)


@pytest.mark.parametrize("cut", [1, 5])
def test_an_answer_that_was_cut_goes_on_as_if_it_had_not_been(cut: int) -> None:
    """With its noise and its penalties; the first part is an answer of the same seed."""
    ways: Any = {"temperature": 1.5, "seed": 11, "frequency_penalty": 2.0}

    async def test(ask: Ask) -> None:
        whole = await ask([USER], **ways, max_tokens=12)
        first = await ask([USER], **ways, max_tokens=cut)
        rest = await ask(assistant(first), **ways, max_tokens=12 - cut)
        assert (len(whole), first + rest) == (12, whole)
        assert await ask(assistant(first), **ways, max_tokens=12, continue_final_message=False) != whole

    with_server(test)


def test_a_session_begins_with_the_beginning_of_an_answer() -> None:
    async def test(ask: Ask) -> None:
        first = await ask(assistant("so"), session_id="ann")
        second = await ask([{"role": "user", "content": "on"}], session_id="ann")
        history = BEGINNING + "so" + first + "<end>\n<user>on<end>\n<model>"
        assert second == await ask(history)
        error = await ask(assistant("so"), session_id="ann")
        assert (error["param"], "continues with one message of the user" in error["message"]) == ("messages", True)

    with_server(test)


def test_variables_of_the_template_are_read_in_every_turn() -> None:
    mood: Any = {"chat_template_kwargs": {"mood": "glad:"}}

    async def test(ask: Ask) -> None:
        assert await ask([USER], reasoning_effort="low") == await ask("[low]" + BEGINNING)
        first = await ask([USER], session_id="ann", **mood)
        assert first == await ask(BEGINNING + "glad:")
        second = await ask([USER], session_id="ann", **mood)
        third = await ask([USER], session_id="ann")
        history = f"{BEGINNING}glad:{first}<end>\n<user>hi<end>\n<model>glad:"
        assert second == await ask(history)
        assert third == await ask(f"{history}{second}<end>\n<user>hi<end>\n<model>")
        error = await ask([USER], session_id="ann", reasoning_effort="low")
        assert (error["param"], "has read already" in error["message"]) == ("reasoning_effort", True)
        assert (await ask([USER], chat_template_kwargs={"chat_template": "x"}))["param"] == "chat_template_kwargs"

    with_server(test)
