"""Parse requests of OpenAI's API into jobs for the engine: relations between fields, sessions, prompts as tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from msrnn.engine.constraint import Constraint
from msrnn.engine.requests import SamplingParams
from msrnn.engine.session_files import Session
from msrnn.engine.session_id import SessionId
from msrnn.engine.sessions import Sessions
from msrnn.errors import UsageError
from msrnn.server.beginnings import Beginning
from msrnn.server.call_formats import CallFormat
from msrnn.server.defaults import NEUTRAL
from msrnn.server.errors import ApiError, bad_value
from msrnn.server.fields import read_request, sampling_params
from msrnn.server.infill import find_ends
from msrnn.server.message_models import Message
from msrnn.server.prompts import Chat, Echo, Prompt, echo_of, read_messages, read_prompts
from msrnn.server.renderings import read_rendering
from msrnn.server.request_models import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
    TemplateFields,
)
from msrnn.server.retention import PromptTexts, prompt_texts
from msrnn.server.structured import find_constraint
from msrnn.server.tool_messages import check_history, order_results
from msrnn.server.tools import CallSearch, RequestTools, read_tools, refuse_continuing
from msrnn.server.usual_fields import NOT_USED_IN_CHATS, NOT_USED_IN_COMPLETIONS

MOST_PROMPT_LOGPROBS = 2**20  # log probabilities of prompts in a reply: about 40 MB


@dataclass(frozen=True)
class Served:
    """The model that a server offers, its sampling defaults and token limits."""

    name: str
    tokenizer: Any
    default_tokens: int  # of an answer whose length is not given
    most_tokens: int  # of a prompt and its answer together
    sessions: Sessions
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of sampling, for requests that do not give them
    allow_special: bool = False  # special tokens in the text of messages are special
    protect: str = "none"  # what requests protect that do not say it: none, system or prompt
    calls: CallFormat | None = None  # in which the model calls tools; None: not known

    @property
    def shown(self) -> dict[str, Any]:
        """The defaults of requests, for `/v1/models`."""
        defaults = {**NEUTRAL, **self.defaults}
        return {"max_tokens": self.default_tokens, "defaults": defaults, "stated_defaults": [*self.defaults]}


@dataclass(frozen=True)
class Job:
    """A checked request."""

    prompts: list[list[int]]
    params: SamplingParams
    stream: bool
    include_usage: bool
    continuous_usage: bool  # in every chunk
    echo: list[Echo]  # the prompts, if they are sent back
    session: str | None
    turns: int  # finished turns of the session that the prompt follows
    protect: int | str  # the first tokens of each prompt that are not evicted, or "prompt"
    keeps_protected: bool  # whether what earlier turns have protected stays so
    retention: int  # tokens between two reports of the tokens that the state holds; 0: no reports
    texts: list[PromptTexts]  # the tokens of each prompt, if the reply reports the tokens that the state holds
    size: int | None  # KV rows per layer, fewer than the server's
    constrained_by: str | None  # the field that says what the answer may be
    calls: CallSearch | None = None  # how calls of tools are found in the answer
    beginning: str = ""  # a name for what a session begins with
    shown: Mapping[str, Any] = field(default_factory=dict)  # fields of a response that are known before its answer


def parse_chat(body: Any, served: Served, owner: str = "") -> Job:
    request = read_request(ChatRequest, body, NOT_USED_IN_CHATS, served.name)
    session = _find_session(request, served, owner)
    given = request.model_fields_set
    if {"max_completion_tokens", "max_tokens"} <= given:
        raise bad_value("max_tokens", "max_tokens and max_completion_tokens are both given: give one of them")
    limit = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_value("top_logprobs", "top_logprobs needs logprobs: true")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    constraint = find_constraint(request)
    tools = read_tools(request, served.tokenizer, served.calls, session, constraint)
    constraint = constraint or tools.constraint
    shown = tools.search.shown_tokens if tools.search is not None else ()
    params = sampling_params(
        request, limit, served.default_tokens, served.defaults, constraint, logprobs=logprobs, shown_tokens=shown
    )
    chat = make_chat(request, request.messages, served, session, tools)
    messages = chat.messages
    if chat.rendering.end == "open" and tools.search is not None:
        raise refuse_continuing()
    try:
        ids = chat.tokens(served.most_tokens)
    except UsageError as error:
        raise bad_value("messages", str(error)) from error
    params = replace(params, continued=chat.count_open_tokens(ids))
    if constraint is not None and params.continued:
        check_own_tokens(served.tokenizer, ids[-params.continued :], messages[-1]["content"])
    texts = partial(prompt_texts, served.tokenizer, messages=messages, render=chat.text)
    system = chat.count_system_tokens(ids) if _protects(request, served) == "system" else 0
    job = _make_job(request, [Prompt(ids, None)], params, constraint, served, session, texts, system=system)
    return replace(job, calls=tools.search, beginning=Beginning(tools.digest).name)


def make_chat(
    request: TemplateFields, given: Sequence[Message], served: Served, session: Session | None, tools: RequestTools
) -> Chat:
    """The messages of a request, checked, and how the template renders them."""
    check_history(given, served.tokenizer, session is None, bool(tools.shown))
    messages, allow = read_messages(order_results(given)), served.allow_special
    rendering = read_rendering(request, served.tokenizer, messages[-1]["role"], session is None, allow)
    rendering = replace(rendering, variables={**rendering.variables, **tools.variables})
    return Chat(served.tokenizer, messages, session, allow, rendering)


def check_own_tokens(tokenizer: Any, tokens: list[int], content: str) -> None:
    """Refuse a continued message that shares a token with the template: a grammar would follow the template's text."""
    if tokenizer.decode(tokens) != content:
        raise bad_value(
            "messages",
            "the last message cannot be continued within a constraint, since its tokens have more than its own text; "
            "begin it with another character",
        )


def parse_completion(body: Any, served: Served, owner: str = "") -> Job:
    request = read_request(CompletionRequest, body, NOT_USED_IN_COMPLETIONS, served.name)
    session, name = _find_session(request, served, owner), request.session_id
    scored = {"logprobs": request.logprobs, "prompt_logprobs": request.logprobs if request.echo else None}
    constraint = find_constraint(request)
    params = sampling_params(request, "max_tokens", served.default_tokens, served.defaults, constraint, **scored)
    if params.max_tokens == 0 and (name is not None or not request.echo):
        raise bad_value("max_tokens", "max_tokens=0: must be 1 or more, or 0 with echo: true and without session_id")
    if params.prompt_logprobs is not None and name is not None:
        raise bad_value(
            "logprobs", "logprobs with echo: those of a session's prompt are not known; leave one of them out"
        )
    if request.suffix and (name is not None or request.echo):
        other = "session_id" if name is not None else "echo"
        raise bad_value("suffix", f"suffix with {other}: the answer is between two texts; leave one of them out")
    prompts = read_prompts(request, served.tokenizer, session is None, served.most_tokens)
    if name is not None and len(prompts) > 1:
        raise bad_value("prompt", f"{len(prompts)} prompts: a session continues with one")
    if request.suffix and not params.ignore_eos:
        params = replace(params, stop_token_ids=[*params.stop_token_ids, *find_ends(served.tokenizer)])
    _check_logprobs(prompts, params)
    if request.protect == "system":
        raise bad_value("protect", "protect='system': a completion has no messages; protect none or prompt")
    texts = partial(prompt_texts, served.tokenizer)
    return _make_job(request, prompts, params, constraint, served, session, texts, request.echo)


def _protects(request: GenerationRequest, served: Served) -> str:
    return request.protect if "protect" in request.model_fields_set else served.protect


def _check_logprobs(prompts: list[Prompt], params: SamplingParams) -> None:
    if params.prompt_logprobs is None:
        return
    wanted = sum(len(prompt.tokens) for prompt in prompts) * params.n * (params.prompt_logprobs + 1)
    if wanted > MOST_PROMPT_LOGPROBS:
        message = f"{wanted:,} log probabilities of the prompt: this server returns {MOST_PROMPT_LOGPROBS:,} at most"
        raise bad_value("logprobs", message)


def _make_job(
    request: GenerationRequest,
    prompts: list[Prompt],
    params: SamplingParams,
    constraint: tuple[str, Constraint] | None,
    served: Served,
    session: Session | None,
    texts: Callable[[list[int], int], PromptTexts],
    echo: bool = False,
    system: int = 0,
) -> Job:
    most = max(len(prompt.tokens) for prompt in prompts) + params.max_tokens
    if most > served.most_tokens:
        message = f"{most:,} tokens, prompt and answer together: this server takes {served.most_tokens:,} at most"
        raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")
    for name in ("stream_options", "retention"):
        if getattr(request, name) and not request.stream:
            raise bad_value(name, f"{name} needs stream: true")
    options, every = request.stream_options or StreamOptions(), request.retention
    before, start = _find_unread_answer(session)
    return Job(
        prompts=[prompt.tokens for prompt in prompts],
        params=params,
        stream=request.stream,
        include_usage=options.include_usage,
        continuous_usage=options.include_usage and options.continuous_usage_stats,
        echo=[echo_of(prompt, served.tokenizer) for prompt in prompts] if echo else [],
        session=request.session_id,
        turns=session.turns if session else 0,
        protect="prompt" if _protects(request, served) == "prompt" else system,
        keeps_protected=_protects(request, served) == "system",
        retention=every,
        size=request.size,
        texts=[texts([*before, *prompt.tokens], start) for prompt in prompts] if every else [],
        constrained_by=constraint[0] if constraint else None,
    )


def _find_unread_answer(session: Session | None) -> tuple[list[int], int]:
    """Tokens of the last answer that `retention` reports before the prompt, and the position of the first one.

    A stop token is not reported with its answer, and the state may have read it by now.
    """
    if session is None:
        return [], 0
    before = session.unread or ([] if session.last is None else [session.last])
    return before, session.tokens - len(before)


def _find_session(request: GenerationRequest, served: Served, owner: str) -> Session | None:
    """The session that the request continues; None: it begins one, or has none."""
    name, turns = request.session_id, request.session_turns
    if name is None:
        if turns is not None:
            raise bad_value("session_turns", "session_turns needs session_id")
        return None
    session = served.sessions.get(SessionId(name, owner))
    has = session.turns if session else 0
    if turns not in (None, has):
        message = f"session {name!r}: has {has} finished turns, and not the {turns} that this request follows"
        raise ApiError(409, message, param="session_turns", code="session_error")
    return session
