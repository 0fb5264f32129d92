"""Replies of OpenAI's API: whole ones, and the chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from msrnn.engine.detokenizer import Detokenizer
from msrnn.engine.requests import Answer, Event, Logprobs, Request
from msrnn.server.answer_calls import AnswerCalls
from msrnn.server.errors import ApiError
from msrnn.server.protocol import Job
from msrnn.server.retention import RetentionField
from msrnn.server.token_texts import TokenTexts

Scored = tuple[int, Logprobs | None]  # a token; None for the first one of a text, which nothing predicts


class Reply:
    """Builds the reply to one job; `requests` are the engine's, one per prompt."""

    kind, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, job: Job, requests: list[Request], model: str, tokenizer: Any) -> None:
        self.job, self.requests, self.tokenizer = job, requests, tokenizer
        self.retention = [RetentionField(tokenizer, texts) for texts in job.texts for _ in range(job.params.n)]
        self.head = {"id": f"{self.kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._texts = TokenTexts.of(tokenizer)
        self._echoed: set[int] = set()  # choices of a stream whose prompt was sent
        self._offsets: dict[int, _Offsets] = {}  # of the choices of a stream

    def complete(self) -> dict[str, Any]:
        choices = [
            self._choice(request, number, answer)
            for request in self.requests
            for number, answer in enumerate(request.answers)
        ]
        return {**self.head, "object": self.whole, "choices": choices, "usage": self.usage()}

    def first_chunks(self) -> list[bytes]:
        """The first messages of a stream."""
        return []

    def echoes_now(self, event: Event) -> bool:
        """Whether the chunks of this event begin with the prompt."""
        return bool(self.job.echo) and self.index(event.request, event.number) not in self._echoed

    def chunks(self, event: Event) -> list[bytes]:
        """The messages of a stream for one event. The first of an answer begins with the prompt, if it is sent back."""
        index = self.index(event.request, event.number)
        if self.echoes_now(event):
            self._echoed.add(index)
            return [self._chunk(self._echo(event.request, index)), *self._new(event)]
        return self._new(event)

    def _new(self, event: Event) -> list[bytes]:
        if not (event.text or event.logprobs or event.finish_reason or self.retention):
            return []
        deltas = self._deltas(event)
        if self.retention and deltas:
            deltas[-1]["retention"] = self.retention[self.index(event.request, event.number)].build(event)
        return [self._chunk(delta) for delta in deltas]

    def last_chunks(self) -> list[bytes]:
        usage = {**self.head, "object": self.chunk, "choices": [], "usage": self.usage()}
        return [*([_format_event(usage)] if self.job.include_usage else []), b"data: [DONE]\n\n"]

    def format_error(self, error: ApiError) -> bytes:
        """The last message of a stream that ends with an error."""
        return format_error(error.body)

    def usage(self) -> dict[str, Any]:
        prompt = sum(len(request.prompt) for request in self.requests)
        kept = sum(min(request.cached_tokens, len(request.prompt)) for request in self.requests if not request.session)
        answers = sum(len(answer.tokens) for request in self.requests for answer in request.answers)
        total = {"prompt_tokens": prompt, "completion_tokens": answers, "total_tokens": prompt + answers}
        return {**total, "prompt_tokens_details": {"cached_tokens": kept}}

    def index(self, request: Request, number: int) -> int:
        return self.requests.index(request) * self.job.params.n + number

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        usage = {"usage": self.usage()} if self.job.continuous_usage else {}
        return _format_event({**self.head, "object": self.chunk, "choices": [choice], **usage})

    def _echo(self, request: Request, index: int) -> dict[str, Any]:
        """A prompt, with its log probabilities if they are wanted."""
        text, offsets = self.job.echo[self.requests.index(request)]
        wanted = self.job.params.prompt_logprobs is not None
        scored = zip(request.prompt, request.prompt_logprobs, strict=True) if wanted else []
        logprobs = self._logprobs([*scored], offsets) if wanted else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _choice(self, request: Request, number: int, answer: Answer) -> dict[str, Any]:
        index = self.index(request, number)
        found: dict[str, Any] = {
            "index": index,
            "text": answer.text,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
        }
        if self.job.params.logprobs is not None:
            found["logprobs"] = self._answer_logprobs(index, _join_tokens(answer))
        if self.job.echo:
            echo = self._echo(request, index)
            found["text"] = echo["text"] + answer.text
            if echo["logprobs"]:
                found["logprobs"] = {
                    name: echo["logprobs"][name] + found["logprobs"][name] for name in found["logprobs"]
                }
        return found

    def _deltas(self, event: Event) -> list[dict[str, Any]]:
        """The choices that the chunks of an event have; the last one has what belongs to its token."""
        index = self.index(event.request, event.number)
        scored = self._new_tokens(event)
        logprobs = self._answer_logprobs(index, scored) if scored else None
        return [{"index": index, "text": event.text, "logprobs": logprobs, "finish_reason": event.finish_reason}]

    def _new_tokens(self, event: Event) -> list[Scored]:
        """The token of an event; at the end also the stop token, which clients count on."""
        ending = event.request.answers[event.number].ending
        if event.token is None:
            return [ending] if ending is not None and event.finish_reason == "stop" else []
        return [(event.token, event.logprobs)] if event.logprobs is not None else []

    def _answer_logprobs(self, index: int, scored: Sequence[Scored]) -> dict[str, Any]:
        """The log probabilities of an answer's tokens, or of the next ones of a stream."""
        if index not in self._offsets:
            start = len(self.job.echo[index // self.job.params.n].text) if self.job.echo else 0
            self._offsets[index] = _Offsets(self.tokenizer, start)
        return self._logprobs(scored, [self._offsets[index].put(token) for token, _ in scored])

    def _logprobs(self, scored: Sequence[Scored], offsets: Sequence[int]) -> dict[str, Any]:
        return {
            "tokens": [self._texts.text(token) for token, _ in scored],
            "token_logprobs": [None if found is None else _finite(found.chosen) for _, found in scored],
            "top_logprobs": [None if found is None else self._top(token, found) for token, found in scored],
            "text_offset": [*offsets],
        }

    def _top(self, token: int, found: Logprobs) -> dict[str, float]:
        """The most likely tokens by their text, and the token itself; of those with one text, the most likely."""
        top: dict[str, float] = {}
        for other, value in [*found.top, (token, found.chosen)]:
            top.setdefault(self._texts.text(other), _finite(value))
        return top


class _Offsets:
    """Where the tokens of an answer begin in its text."""

    def __init__(self, tokenizer: Any, start: int) -> None:
        self._pieces, self._at = Detokenizer(tokenizer, skip_special=True), start

    def put(self, token: int) -> int:
        at = self._at
        self._at += len(self._pieces.put(token))
        return at


class ChatReply(Reply):
    kind, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, job: Job, requests: list[Request], model: str, tokenizer: Any) -> None:
        super().__init__(job, requests, model, tokenizer)
        self._calls: dict[int, AnswerCalls] = {}  # of the choices of a stream

    def first_chunks(self) -> list[bytes]:
        role = {"role": "assistant", "content": ""}
        first = {"delta": role, "logprobs": None, "finish_reason": None}
        return [self._chunk({"index": number, **first}) for number in range(self.job.params.n)]

    def _choice(self, request: Request, number: int, answer: Answer) -> dict[str, Any]:
        wanted = self.job.params.logprobs is not None
        logprobs = self._content([*zip(answer.tokens, answer.logprobs, strict=True)]) if wanted else None
        calls = AnswerCalls(self.job.calls)
        message = calls.make_message(answer.text)
        reason = calls.finish_reason(answer.finish_reason)
        return {"index": number, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _deltas(self, event: Event) -> list[dict[str, Any]]:
        found = event.token is not None and event.logprobs is not None
        logprobs = self._content([(event.token, event.logprobs)]) if found else None
        calls = self._calls.setdefault(event.number, AnswerCalls(self.job.calls))
        deltas = calls.list_deltas(event.text, ends=event.finish_reason is not None)
        if not deltas and not (logprobs or event.finish_reason or self.retention):
            return []
        deltas = deltas or [{}]
        choices = [{"index": event.number, "delta": one, "logprobs": None, "finish_reason": None} for one in deltas]
        last = {"logprobs": logprobs, "finish_reason": calls.finish_reason(event.finish_reason)}
        return [*choices[:-1], {**choices[-1], **last}]

    def _content(self, pairs: Sequence[Any]) -> dict[str, Any]:
        def entry(token: int, value: float) -> dict[str, Any]:
            text, content = self._texts.text(token), self._texts.raw(token)
            return {"token": text, "logprob": _finite(value), "bytes": [*content]}

        return {"content": [{**entry(t, p.chosen), "top_logprobs": [entry(*top) for top in p.top]} for t, p in pairs]}


def _join_tokens(answer: Answer) -> list[Scored]:
    """The tokens of an answer and the stop token that ended it."""
    return [*zip(answer.tokens, answer.logprobs, strict=True), *([answer.ending] if answer.ending else [])]


def _finite(logprob: float) -> float:
    """JSON has no infinity; other servers write this number as well."""
    return max(logprob, -9999.0)


def _format_event(value: dict[str, Any]) -> bytes:
    """One event of a stream of server-sent events."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def format_error(body: dict[str, Any]) -> bytes:
    return _format_event(body)
