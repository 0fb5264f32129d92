"""Replies of OpenAI's API: whole ones, and the chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from msrnn.engine.requests import Answer, Event, Logprobs, Request
from msrnn.serve.protocol import Job
from msrnn.serve.retention import RetentionField


class Reply:
    """Builds the reply to one job; `requests` are the engine's, one per prompt."""

    kind, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, job: Job, requests: list[Request], model: str, tokenizer: Any) -> None:
        self.job, self.requests, self.tokenizer = job, requests, tokenizer
        self.retention = [RetentionField(tokenizer, texts) for texts in job.texts for _ in range(job.params.n)]
        self.head = {"id": f"{self.kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def complete(self) -> dict[str, Any]:
        choices = [
            self._choice(request, number, answer)
            for request in self.requests
            for number, answer in enumerate(request.answers)
        ]
        return {**self.head, "object": self.whole, "choices": choices, "usage": self.usage()}

    def first_chunks(self) -> list[bytes]:
        """What a stream begins with."""
        return []

    def chunks(self, event: Event) -> list[bytes]:
        """What an event adds to a stream."""
        if not (event.text or event.logprobs or event.finish_reason or self.retention):
            return []
        delta = self._delta(event)
        if self.retention:
            delta["retention"] = self.retention[self.index(event.request, event.number)].of(event)
        return [self._chunk(delta)]

    def last_chunks(self) -> list[bytes]:
        usage = {**self.head, "object": self.chunk, "choices": [], "usage": self.usage()}
        return [*([_sent(usage)] if self.job.include_usage else []), b"data: [DONE]\n\n"]

    def usage(self) -> dict[str, Any]:
        prompt = sum(len(request.prompt) for request in self.requests)
        kept = sum(min(request.kept_tokens, len(request.prompt)) for request in self.requests if not request.session)
        answers = sum(len(answer.tokens) for request in self.requests for answer in request.answers)
        total = {"prompt_tokens": prompt, "completion_tokens": answers, "total_tokens": prompt + answers}
        return {**total, "prompt_tokens_details": {"cached_tokens": kept}}

    def index(self, request: Request, number: int) -> int:
        return self.requests.index(request) * self.job.params.n + number

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        usage = {"usage": self.usage()} if self.job.continuous_usage else {}
        return _sent({**self.head, "object": self.chunk, "choices": [choice], **usage})

    def _choice(self, request: Request, number: int, answer: Answer) -> dict[str, Any]:
        echoed = self._prompt_text(request) if self.job.echo else ""
        found = {"index": self.index(request, number), "text": echoed + answer.text}
        logprobs = self._logprobs(answer.tokens, answer.logprobs) if self.job.params.logprobs is not None else None
        return {**found, "logprobs": logprobs, "finish_reason": answer.finish_reason}

    def _delta(self, event: Event) -> dict[str, Any]:
        tokens = [event.token] if event.token is not None else []
        logprobs = self._logprobs(tokens, [event.logprobs]) if event.logprobs is not None else None
        found = {"index": self.index(event.request, event.number), "text": event.text}
        return {**found, "logprobs": logprobs, "finish_reason": event.finish_reason}

    def _prompt_text(self, request: Request) -> str:
        return str(self.tokenizer.decode(request.prompt, skip_special_tokens=True))

    def _token(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))

    def _logprobs(self, tokens: list[int], found: list[Logprobs]) -> dict[str, Any]:
        return {
            "tokens": [self._token(token) for token in tokens],
            "token_logprobs": [_finite(each.chosen) for each in found],
            "top_logprobs": [{self._token(token): _finite(value) for token, value in each.top} for each in found],
        }


class ChatReply(Reply):
    kind, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first_chunks(self) -> list[bytes]:
        role = {"role": "assistant", "content": ""}
        first = {"delta": role, "logprobs": None, "finish_reason": None}
        return [self._chunk({"index": number, **first}) for number in range(self.job.params.n)]

    def _choice(self, request: Request, number: int, answer: Answer) -> dict[str, Any]:
        logprobs = self._logprobs(answer.tokens, answer.logprobs) if self.job.params.logprobs is not None else None
        message = {"role": "assistant", "content": answer.text}
        return {"index": number, "message": message, "logprobs": logprobs, "finish_reason": answer.finish_reason}

    def _delta(self, event: Event) -> dict[str, Any]:
        tokens = [event.token] if event.token is not None else []
        logprobs = self._logprobs(tokens, [event.logprobs]) if event.logprobs is not None else None
        delta = {"content": event.text} if event.text else {}
        return {"index": event.number, "delta": delta, "logprobs": logprobs, "finish_reason": event.finish_reason}

    def _logprobs(self, tokens: list[int], found: list[Logprobs]) -> dict[str, Any]:
        def entry(token: int, value: float) -> dict[str, Any]:
            text = self._token(token)
            return {"token": text, "logprob": _finite(value), "bytes": [*text.encode()]}

        pairs = zip(tokens, found, strict=True)
        return {"content": [{**entry(t, p.chosen), "top_logprobs": [entry(*top) for top in p.top]} for t, p in pairs]}


def _finite(logprob: float) -> float:
    """JSON has no infinity; other servers write this number as well."""
    return max(logprob, -9999.0)


def _sent(value: dict[str, Any]) -> bytes:
    """One event of a stream of server-sent events."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def sent_error(body: dict[str, Any]) -> bytes:
    return _sent(body)
