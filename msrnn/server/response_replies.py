"""Replies to requests for responses: whole ones, and the events of a stream."""

from __future__ import annotations

import json
from typing import Any

from msrnn.engine.requests import Event, Request
from msrnn.server.errors import ApiError
from msrnn.server.protocol import Job
from msrnn.server.replies import Reply
from msrnn.server.response_errors import rename_error
from msrnn.server.response_output import STATUSES, ResponseOutput


class ResponseReply(Reply):
    """The response to one job, which has one answer."""

    def __init__(self, job: Job, requests: list[Request], model: str, tokenizer: Any) -> None:
        super().__init__(job, requests, model, tokenizer)
        (request,) = requests
        (self._answer,) = request.answers
        self._output = ResponseOutput(job.calls)
        self._sent = 0  # events

    def complete(self) -> dict[str, Any]:
        for _ in self._output.read(self._answer.text, self._answer.finish_reason):
            pass
        return self._show()

    def first_chunks(self) -> list[bytes]:
        begun = {**self._show(), "status": "in_progress", "usage": None}
        return [self._format({"type": f"response.{kind}", "response": begun}) for kind in ("created", "in_progress")]

    def chunks(self, event: Event) -> list[bytes]:
        return [self._format(one) for one in self._output.read(event.text, event.finish_reason)]

    def last_chunks(self) -> list[bytes]:
        response = self._show()
        kind = "completed" if response["status"] == "completed" else "incomplete"
        return [self._format({"type": f"response.{kind}", "response": response})]

    def format_error(self, error: ApiError) -> bytes:
        """Clients of OpenAI's API look for the error in the event, or inside of it."""
        body = rename_error(error).body
        inner = {name: body["error"][name] for name in ("code", "message", "param")}
        return self._format({"type": "error", **inner, **body})

    def _show(self) -> dict[str, Any]:
        """The response so far."""
        status = STATUSES.get(self._answer.finish_reason or "", "in_progress")
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        about = {"status": status, "error": None, "incomplete_details": details}
        return {**self.job.shown, **about, "output": self._output.items, "usage": self._count_tokens()}

    def _count_tokens(self) -> dict[str, Any]:
        usage = self.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }

    def _format(self, event: dict[str, Any]) -> bytes:
        """One event of a stream of server-sent events."""
        kind, number = event["type"], self._sent
        self._sent += 1
        text = json.dumps({"type": kind, "sequence_number": number, **event}, ensure_ascii=False)
        return f"event: {kind}\ndata: {text}\n\n".encode()
