"""Requests of OpenAI's API: every field is checked, and one that is not supported is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msrnn.engine.requests import SamplingParams
from msrnn.engine.session_files import Session
from msrnn.engine.session_id import SessionId
from msrnn.engine.sessions import Sessions
from msrnn.errors import SessionError, UsageError
from msrnn.serve.defaults import NEUTRAL
from msrnn.serve.errors import ApiError, bad
from msrnn.serve.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    USUAL_IN_CHATS,
    USUAL_IN_COMPLETIONS,
    boolean,
    given_fields,
    retention_interval,
    sampling_params,
)
from msrnn.serve.prompts import Chat, Echo, Prompt, echo_of, read_messages, read_prompts
from msrnn.serve.retention import PromptTexts, prompt_texts

MOST_PROMPT_LOGPROBS = 2**20  # log probabilities of prompts in a reply: about 40 MB


@dataclass(frozen=True)
class Served:
    """What the server offers, and its limits."""

    name: str
    tokenizer: Any
    default_tokens: int  # of an answer whose length is not given
    most_tokens: int  # of a prompt and its answer together
    sessions: Sessions
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of sampling, for requests that do not give them
    allow_special: bool = False  # special tokens in the text of messages are special

    @property
    def shown(self) -> dict[str, Any]:
        """What requests have that do not say otherwise."""
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
    retention: int  # tokens after which the reply tells again what the state holds; 0: it does not
    texts: list[PromptTexts]  # the tokens of each prompt, if the reply tells what the state holds


def chat_job(body: Any, served: Served, owner: str = "") -> Job:
    fields = given_fields(body, CHAT_FIELDS, USUAL_IN_CHATS, served.name)
    messages = read_messages(fields.get("messages"))
    name, session = _session(fields, served, owner)
    if "max_completion_tokens" in fields and "max_tokens" in fields:
        raise bad("max_tokens", "max_tokens and max_completion_tokens are both given: give one of them")
    limit = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    wanted = boolean(fields, "logprobs")
    top = fields.get("top_logprobs")
    if top is not None and not wanted:
        raise bad("top_logprobs", "top_logprobs needs logprobs: true")
    logprobs = (top or 0) if wanted else None
    params = sampling_params(fields, limit, served.default_tokens, served.defaults, logprobs=logprobs)
    if params.max_tokens == 0:
        raise bad(limit, f"{limit}=0: must be 1 or more")
    chat = Chat(served.tokenizer, messages, session, served.allow_special)
    try:
        ids = chat.tokens(served.most_tokens)
    except UsageError as error:
        raise bad("messages", str(error)) from error
    texts = partial(prompt_texts, served.tokenizer, messages=messages, render=chat.text)
    return _job(fields, [Prompt(ids, None)], params, served, (name, session), texts)


def completion_job(body: Any, served: Served, owner: str = "") -> Job:
    fields = given_fields(body, COMPLETION_FIELDS, USUAL_IN_COMPLETIONS, served.name)
    name, session = _session(fields, served, owner)
    echo, logprobs = boolean(fields, "echo"), fields.get("logprobs")
    scored = {"logprobs": logprobs, "prompt_logprobs": logprobs if echo else None}
    params = sampling_params(fields, "max_tokens", served.default_tokens, served.defaults, **scored)
    if params.max_tokens == 0 and (name is not None or not echo):
        raise bad("max_tokens", "max_tokens=0: must be 1 or more, or 0 with echo: true and without session_id")
    if params.prompt_logprobs is not None and name is not None:
        raise bad("logprobs", "logprobs with echo: those of a session's prompt are not known; leave one of them out")
    prompts = read_prompts(fields.get("prompt"), served.tokenizer, session is None, served.most_tokens)
    if name is not None and len(prompts) > 1:
        raise bad("prompt", f"{len(prompts)} prompts: a session goes on with one")
    _check_logprobs(prompts, params)
    return _job(fields, prompts, params, served, (name, session), partial(prompt_texts, served.tokenizer), echo)


def _check_logprobs(prompts: list[Prompt], params: SamplingParams) -> None:
    if params.prompt_logprobs is None:
        return
    wanted = sum(len(prompt.tokens) for prompt in prompts) * params.n * (params.prompt_logprobs + 1)
    if wanted > MOST_PROMPT_LOGPROBS:
        message = f"{wanted:,} log probabilities of the prompt: this server returns {MOST_PROMPT_LOGPROBS:,} at most"
        raise bad("logprobs", message)


def _job(
    fields: Mapping[str, Any],
    prompts: list[Prompt],
    params: SamplingParams,
    served: Served,
    conversation: tuple[str | None, Session | None],
    texts: Callable[[list[int], int], PromptTexts],
    echo: bool = False,
) -> Job:
    most = max(len(prompt.tokens) for prompt in prompts) + params.max_tokens
    if most > served.most_tokens:
        message = f"{most:,} tokens, prompt and answer together: this server takes {served.most_tokens:,} at most"
        raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")
    stream, options = boolean(fields, "stream"), fields.get("stream_options")
    if options is not None:
        if not stream:
            raise bad("stream_options", "stream_options needs stream: true")
        if not isinstance(options, dict) or options.keys() - {"include_usage", "continuous_usage_stats"}:
            message = "stream_options must be an object, and may have include_usage and continuous_usage_stats only"
            raise bad("stream_options", message)
    name, session = conversation
    turns = session.turns if session else 0
    every = retention_interval(fields, stream)
    before, start = _told_before(session)
    found = [texts([*before, *prompt.tokens], start) for prompt in prompts] if every else []
    usage = [boolean(options or {}, option) for option in ("include_usage", "continuous_usage_stats")]
    echoes = [echo_of(prompt, served.tokenizer) for prompt in prompts] if echo else []
    ids = [prompt.tokens for prompt in prompts]
    return Job(ids, params, stream, usage[0], all(usage), echoes, name, turns, every, found)


def _told_before(session: Session | None) -> tuple[list[int], int]:
    """Tokens of the last answer that `retention` tells before the prompt, and the position of the first one.

    A stop token is not told with its answer, and the state may have read it by now.
    """
    if session is None:
        return [], 0
    before = session.unread or ([] if session.last is None else [session.last])
    return before, session.tokens - len(before)


def _session(fields: Mapping[str, Any], served: Served, owner: str) -> tuple[str | None, Session | None]:
    """The name of the session, and the session if there is one already."""
    name, turns = fields.get("session_id"), fields.get("session_turns")
    if turns is not None and (type(turns) is not int or turns < 0):
        raise bad("session_turns", f"session_turns={turns!r:.100}: must be a whole number, 0 or more")
    if name is None:
        if turns is not None:
            raise bad("session_turns", "session_turns needs session_id")
        return None, None
    try:
        session = served.sessions.get(SessionId(name, owner))
    except SessionError:
        raise
    except UsageError as error:
        raise bad("session_id", str(error)) from error
    has = session.turns if session else 0
    if turns not in (None, has):
        message = f"session {name!r}: has {has} finished turns, and not the {turns} that this request follows"
        raise ApiError(409, message, param="session_turns", code="session_error")
    return name, session
