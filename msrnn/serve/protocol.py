"""Requests of OpenAI's API: every field is checked, and one that is not supported is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from msrnn.engine.requests import SamplingParams
from msrnn.engine.session_files import Session, SessionId
from msrnn.engine.sessions import Sessions
from msrnn.errors import SessionError, UsageError
from msrnn.hf.chat_template import check_template, closing, encode, following, render
from msrnn.serve.errors import ApiError, bad
from msrnn.serve.retention import PromptTexts, prompt_texts

ROLES = ("system", "developer", "user", "assistant")
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop_token_ids",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
)
_OTHERS = (
    *("model", "max_tokens", "stop", "logit_bias", "stream", "stream_options", "user", "retention"),
    *("session_id", "session_turns"),
)
_COMMON = {*_SAMPLING, *_OTHERS}
CHAT_FIELDS = _COMMON | {"messages", "max_completion_tokens", "logprobs", "top_logprobs"}
COMPLETION_FIELDS = _COMMON | {"prompt", "echo", "logprobs"}


@dataclass(frozen=True)
class Served:
    """What the server offers, and its limits."""

    name: str
    tokenizer: Any
    default_tokens: int  # of an answer whose length is not given
    most_tokens: int  # of a prompt and its answer together
    sessions: Sessions


@dataclass(frozen=True)
class Job:
    """A checked request."""

    prompts: list[list[int]]
    params: SamplingParams
    stream: bool
    include_usage: bool
    continuous_usage: bool  # in every chunk
    echo: bool
    session: str | None
    turns: int  # finished turns of the session that the prompt follows
    retention: int  # tokens after which the reply tells again what the state holds; 0: it does not
    texts: list[PromptTexts]  # the tokens of each prompt, if the reply tells what the state holds


def chat_job(body: Any, served: Served, owner: str = "") -> Job:
    fields = _fields(body, CHAT_FIELDS, served)
    messages = _messages(fields.get("messages"))
    name, session = _session(fields, served, owner)
    if "max_completion_tokens" in fields and "max_tokens" in fields:
        raise bad("max_tokens", "max_tokens and max_completion_tokens are both given: give one of them")
    limit = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    wanted = _boolean(fields, "logprobs")
    top = fields.get("top_logprobs")
    if top is not None and not wanted:
        raise bad("top_logprobs", "top_logprobs needs logprobs: true")
    params = _params(fields, limit, served, (top or 0) if wanted else None)
    try:
        ids = _rendered(served.tokenizer, messages, session)
    except UsageError as error:
        raise bad("messages", str(error)) from error
    text = partial(_text, served.tokenizer, session)
    texts = partial(prompt_texts, served.tokenizer, messages=messages, render=text)
    return _job(fields, [ids], params, served, (name, session), texts, echo=False)


def completion_job(body: Any, served: Served, owner: str = "") -> Job:
    fields = _fields(body, COMPLETION_FIELDS, served)
    name, session = _session(fields, served, owner)
    prompts = _prompts(fields.get("prompt"), served.tokenizer, begins=session is None)
    if name is not None and len(prompts) > 1:
        raise bad("prompt", f"{len(prompts)} prompts: a session goes on with one")
    params = _params(fields, "max_tokens", served, fields.get("logprobs"))
    texts = partial(prompt_texts, served.tokenizer)
    return _job(fields, prompts, params, served, (name, session), texts, echo=_boolean(fields, "echo"))


def _fields(body: Any, known: set[str], served: Served) -> dict[str, Any]:
    """The fields that are given; null counts as not given."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    fields = {name: value for name, value in body.items() if value is not None}
    for name in fields:
        if name not in known:
            message = f"{name!r:.100} is not supported by this server: leave it out"
            raise ApiError(400, message, param=_shown(name), code="unsupported_field")
    model = fields.get("model", served.name)
    if model != served.name:
        message = f"model {model!r:.100} is not served here: the model is {served.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return fields


def _params(fields: Mapping[str, Any], limit: str, served: Served, logprobs: Any) -> SamplingParams:
    given = {name: fields[name] for name in _SAMPLING if name in fields}
    stop = fields.get("stop", [])
    biases = fields.get("logit_bias", {})
    if not isinstance(biases, dict) or not all(token.isdecimal() and len(token) < 10 for token in biases):
        raise bad("logit_bias", "logit_bias must be an object from token ids to numbers")
    if not isinstance(given.get("stop_token_ids", []), list):
        raise bad("stop_token_ids", "stop_token_ids must be a list of token ids")
    if not isinstance(given.get("ignore_eos", False), bool):
        raise bad("ignore_eos", "ignore_eos must be true or false")
    if isinstance(logprobs, bool):
        raise bad("logprobs", "logprobs must be a whole number here")
    if given.get("top_k") == -1:
        given["top_k"] = 0  # some clients write "all" in this way
    names = {"max_tokens": limit, "logprobs": "top_logprobs" if "top_logprobs" in fields else "logprobs"}
    try:
        return SamplingParams(
            **given,
            max_tokens=fields.get(limit, served.default_tokens),
            stop=[stop] if isinstance(stop, str) else stop if isinstance(stop, list) else [stop],
            logit_bias={int(token): bias for token, bias in biases.items()},
            logprobs=logprobs,
        )
    except UsageError as error:
        name = str(error).partition("=")[0].partition(" ")[0]
        raise bad(names.get(name, name), str(error)) from error


def _job(
    fields: Mapping[str, Any],
    prompts: list[list[int]],
    params: SamplingParams,
    served: Served,
    conversation: tuple[str | None, Session | None],
    texts: Callable[[list[int], int], PromptTexts],
    echo: bool,
) -> Job:
    most = max(map(len, prompts)) + params.max_tokens
    if most > served.most_tokens:
        message = f"{most:,} tokens, prompt and answer together: this server takes {served.most_tokens:,} at most"
        raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")
    stream, options = _boolean(fields, "stream"), fields.get("stream_options")
    if options is not None:
        if not stream:
            raise bad("stream_options", "stream_options needs stream: true")
        if not isinstance(options, dict) or options.keys() - {"include_usage", "continuous_usage_stats"}:
            message = "stream_options must be an object, and may have include_usage and continuous_usage_stats only"
            raise bad("stream_options", message)
    if not isinstance(fields.get("user", ""), str):
        raise bad("user", "user must be a string")
    name, session = conversation
    turns = session.turns if session else 0
    every = _retention(fields, stream)
    unread, start = (session.unread, int(session.state.seen[0])) if session else ([], 0)
    found = [texts([*unread, *prompt], start) for prompt in prompts] if every else []
    usage = [_boolean(options or {}, option) for option in ("include_usage", "continuous_usage_stats")]
    return Job(prompts, params, stream, usage[0], all(usage), echo, name, turns, every, found)


def _retention(fields: Mapping[str, Any], stream: bool) -> int:
    every = fields.get("retention", 0)
    if type(every) is not int or every < 0:
        raise bad("retention", f"retention={every!r:.100}: must be a whole number of tokens, 0 or more")
    if every and not stream:
        raise bad("retention", "retention needs stream: true")
    return every


def _boolean(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise bad(name, f"{name} must be true or false")
    return value


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


def _prompts(value: Any, tokenizer: Any, begins: bool) -> list[list[int]]:
    """Text, token ids, or a list of either. A text that begins gets the tokenizer's special tokens."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise bad("prompt", "prompt must be a text, a list of token ids, or a list of either, and not empty")
    if all(type(token) is int for token in value):
        value = [value]
    prompts = []
    for prompt in value:
        if isinstance(prompt, str):
            _check_characters(prompt, "prompt")
            prompts.append(encode(tokenizer, prompt, begins)[0].tolist())
        elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
            prompts.append(prompt)
        else:
            raise bad("prompt", "prompt must be a text, a list of token ids, or a list of either")
    if not all(prompts):
        raise bad("prompt", "prompt is empty: give one token or more")
    return prompts


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise bad("messages", "messages must be a list of one message or more")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(value)]


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise bad(where, f"{where}: must be an object whose role is one of {', '.join(ROLES)}")
    for name, value in message.items():
        if name not in ("role", "content", "name") and value is not None:
            raise bad(f"{where}.{_shown(name)}", f"{where}: {name!r:.100} is not supported by this server")
    content = message.get("content")
    if isinstance(content, list):
        texts = [part["text"] for part in content if _is_text(part)]
        content = "".join(texts) if texts and len(texts) == len(content) else None
    if not isinstance(content, str):
        raise bad(f"{where}.content", f"{where}: content must be text; images and other parts are not supported")
    _check_characters(content, f"{where}.content")
    role = "system" if message["role"] == "developer" else message["role"]
    return {"role": role, "content": content}


def _check_characters(text: str, where: str) -> None:
    """JSON can spell half of a character, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad(where, f"{where}: has half of a character (a lone surrogate) at {error.start}") from None


def _shown(name: str) -> str:
    """A name that a client has sent, in an error."""
    return ascii(name)[1:-1][:100]


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _text(tokenizer: Any, session: Session | None, messages: list[dict[str, str]]) -> str:
    """What the template makes of messages, after an answer in a session that exists."""
    if session is None:
        return render(tokenizer, messages, prompt=True)
    return closing(tokenizer) + following(tokenizer, messages[0]["content"])


def _rendered(tokenizer: Any, messages: list[dict[str, str]], session: Session | None) -> list[int]:
    """The tokens of a conversation up to where the answer begins; of a session that exists, what is new of them."""
    check_template(tokenizer)
    if session is None:
        ids: list[int] = encode(tokenizer, render(tokenizer, messages, prompt=True), False)[0].tolist()
        return ids
    if [message["role"] for message in messages] != ["user"]:
        raise UsageError("a session that has begun goes on with one message of the user")
    end: list[int] = encode(tokenizer, closing(tokenizer), False)[0].tolist()
    turn: list[int] = encode(tokenizer, following(tokenizer, messages[0]["content"]), False)[0].tolist()
    return [*(end[1:] if end[:1] == [session.last] else end), *turn]
