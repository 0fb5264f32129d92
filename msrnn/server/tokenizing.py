"""Endpoints that tokenize and detokenize, as vLLM has them: what a prompt costs, before it is sent."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from msrnn.engine.engine import Engine
from msrnn.errors import UsageError, show
from msrnn.hf.chat_template import encode
from msrnn.server.errors import bad_value
from msrnn.server.fields import read_request
from msrnn.server.message_models import MOST_MESSAGES, Messages
from msrnn.server.prompts import check_fits, too_long_error
from msrnn.server.protocol import Served, make_chat
from msrnn.server.request_body import Body, Text, WholeText
from msrnn.server.request_models import TemplateFields, TokenIds
from msrnn.server.sessions import Guard
from msrnn.server.tool_models import ShownTools
from msrnn.server.tools import show_tools

_MODEL = Field("", description="the name of the model; by default the one that is served")


class TokenizeRequest(TemplateFields, ShownTools):
    model: Text = _MODEL
    prompt: WholeText | None = Field(
        None, description="a text, as of `/v1/completions`", json_schema_extra={"x-must": "a text"}
    )
    messages: Messages | None = Field(
        None,
        description="or a conversation, as of `/v1/chat/completions`",
        json_schema_extra={"x-must": f"a list of 1 to {MOST_MESSAGES:,} messages"},
    )
    add_special_tokens: bool | None = Field(
        None,
        description="begin with the tokenizer's special tokens; by default true for a `prompt`, and not for messages",
    )
    return_token_strs: bool = Field(False, description="also return each token as it is in the vocabulary")


class DetokenizeRequest(Body):
    model: Text = _MODEL
    tokens: TokenIds = Field(description="token ids", json_schema_extra={"x-must": "a list of token ids"})


# Answers a request with a function of its JSON, in another thread and within the limits of a server.
Run = Callable[[HttpRequest, Callable[[Any], Response]], Coroutine[Any, Any, Response]]


class TokenEndpoints:
    def __init__(self, engine: Engine, served: Served, run: Run) -> None:
        self._engine, self._served, self._run = engine, served, run

    def routes(self, guard: Guard) -> list[Route]:
        return [
            Route("/tokenize", guard(self.tokenize), methods=["POST"]),
            Route("/detokenize", guard(self.detokenize), methods=["POST"]),
        ]

    async def tokenize(self, http: HttpRequest) -> Response:
        return await self._run(http, self._tokenize)

    async def detokenize(self, http: HttpRequest) -> Response:
        return await self._run(http, self._detokenize)

    def _tokenize(self, body: Any) -> Response:
        request = read_request(TokenizeRequest, body, {}, self._served.name)
        tokens = encode_request(request, self._served)
        names = self._served.tokenizer.convert_ids_to_tokens(tokens) if request.return_token_strs else None
        most = self._engine.find_longest(self._served.most_tokens)
        return JSONResponse({"count": len(tokens), "max_model_len": most, "tokens": tokens, "token_strs": names})

    def _detokenize(self, body: Any) -> Response:
        request, most = read_request(DetokenizeRequest, body, {}, self._served.name), self._served.most_tokens
        vocabulary = self._engine.executor.facts.vocabulary
        if len(request.tokens) > most:
            raise too_long_error(f"{len(request.tokens):,} tokens", most, "tokens")
        for token in request.tokens:
            if not 0 <= token < vocabulary:
                raise bad_value("tokens", f"tokens: {show(token)}: this model has ids 0 to {vocabulary - 1}")
        return JSONResponse({"prompt": str(self._served.tokenizer.decode(request.tokens))})


def encode_request(request: TokenizeRequest, served: Served) -> list[int]:
    """The tokens that a completion or a chat with this prompt or these messages reads."""
    if (request.prompt is None) == (request.messages is None):
        raise bad_value("prompt", "prompt and messages: give one of them")
    if request.messages is None:
        return _encode_prompt(request, served)
    if request.add_special_tokens:
        message = "add_special_tokens=true: the chat template writes the special tokens of messages; leave it out"
        raise bad_value("add_special_tokens", message)
    chat = make_chat(request, request.messages, served, None, show_tools(request, served.tokenizer))
    try:
        return chat.tokens(served.most_tokens, "messages")
    except UsageError as error:
        raise bad_value("messages", str(error)) from error


def _encode_prompt(request: TokenizeRequest, served: Served) -> list[int]:
    for name in (*TemplateFields.model_fields, *ShownTools.model_fields):
        if name in request.model_fields_set:
            raise bad_value(name, f"{name} is for messages, and this request has a prompt: leave it out")
    assert request.prompt is not None
    check_fits(request.prompt, served.tokenizer, served.most_tokens, "prompt")
    special = request.add_special_tokens is not False
    tokens: list[int] = encode(served.tokenizer, request.prompt, special)[0].tolist()
    return tokens
