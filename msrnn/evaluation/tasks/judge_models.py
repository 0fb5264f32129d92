"""Judges that compare two responses: a model behind an OpenAI-compatible endpoint, or a local model."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import math
import os
import socket
import ssl
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import torch
from transformers import PreTrainedModel

from msrnn.errors import UsageError
from msrnn.evaluation.data.prompts import prompt_ids
from msrnn.hf.rnn import MultiStateRNN
from msrnn.policy import FULL

KEY, ADDRESS = "OPENAI_API_KEY", "OPENAI_BASE_URL"
OPENAI = "https://api.openai.com/v1"
ANSWER_TOKENS = 32  # a single phrase
RETRIES = 6  # of one request that failed for a temporary reason
RESUME = "answers so far are kept: run the same command to resume"
NO_KEY = "none"  # sent to servers other than OpenAI's
NO_COMPLETION = "the response is not a chat completion"
OPTIONS = ("(A)", "(B)", "(C)")
FINGERPRINT = "judge_fingerprint"  # of a local judge; an endpoint has none
LIKELIHOODS = "log_likelihoods"  # of (A), (B) and (C), from a local judge


class Answer(NamedTuple):
    text: str
    details: dict[str, Any]  # written into its row


class Judge(Protocol):
    name: str
    key: dict[str, Any]  # identifies its answers
    device: str
    requests: int  # made so far

    def ask(self, prompt: str, most: int | None = None) -> Answer:
        """Answer a prompt, with at most `most` requests."""
        ...


class EndpointFailedError(UsageError):
    """An endpoint failed for a temporary reason, after all retries."""


class EndpointJudge:
    """A model behind an OpenAI-compatible endpoint. The client of the package openai retries requests.

    The key is read from OPENAI_API_KEY, and sent to the endpoint only.

    name      of the model, such as "gpt-4o"
    base_url  the endpoint's address; None: OPENAI_BASE_URL, or else OpenAI's
    timeout   seconds to wait for an answer
    on_retry  gets the reason of each retry
    """

    device = "cpu"

    def __init__(
        self,
        name: str,
        base_url: str | None = None,
        timeout: float = 60.0,
        on_retry: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.base_url = base_url or os.environ.get(ADDRESS) or None
        self.name, self.timeout, self.on_retry, self.requests = name, timeout, on_retry, 0
        # The address itself is not stored: it may contain a password.
        self.key = {"judge": name, "endpoint": _digest(self.base_url or OPENAI)}
        self._key = os.environ.get(KEY) or (NO_KEY if self.base_url else "")
        self._client: Any = None
        self._reason = ""  # why the newest request failed

    def open(self) -> None:
        """Make the client, which needs the package openai and a key."""
        check_openai()
        from openai import OpenAI

        if not self._key:
            raise UsageError(f"judge {self.name!r}: no key; set {KEY}, or give the address of another server")
        self._client = OpenAI(
            api_key=self._key, base_url=self.base_url, timeout=self.timeout, http_client=self._http_client()
        )

    def _http_client(self) -> Any:
        """A client that counts requests, keeps the reason of a failure, and reports retries."""
        from openai import DefaultHttpxClient, OpenAIError

        endpoint = self

        class Client(DefaultHttpxClient):
            def send(self, request: Any, **options: Any) -> Any:
                if endpoint._reason:
                    endpoint.on_retry(f"{endpoint._reason}; trying again")
                endpoint.requests += 1
                try:
                    response = super().send(request, **options)
                    response.read()
                except Exception as error:
                    endpoint._reason = endpoint._redact(error)
                    if unreachable(error):
                        raise OpenAIError(endpoint._reason) from error  # the client does not retry its own errors
                    raise
                if not response.is_success:
                    endpoint._reason = endpoint._status_reason(response)
                elif not _is_completion(response):
                    endpoint._reason = NO_COMPLETION
                    response.status_code = 502  # as a gateway reports such a response: the client retries
                return response

        return Client(timeout=self.timeout)

    def ask(self, prompt: str, most: int | None = None) -> Answer:
        if self._client is None:
            self.open()
        from openai import APIConnectionError, APIStatusError, OpenAIError

        self._reason, before = "", self.requests
        retries = RETRIES if most is None else min(RETRIES, most - 1)
        messages: Any = [{"role": "user", "content": prompt}]
        try:
            completion: Any = self._client.with_options(max_retries=retries).chat.completions.create(
                model=self.name, messages=messages, temperature=0, max_tokens=ANSWER_TOKENS
            )
        except APIStatusError as error:
            if error.status_code not in (408, 409, 429) and error.status_code < 500:
                raise UsageError(
                    f"judge {self.name!r}: the endpoint refuses ({self._reason}); check the name and the key"
                ) from None
        except APIConnectionError:
            pass
        except OpenAIError as error:
            if not unreachable(error):
                raise
            raise UsageError(
                f"{self._address}: no connection ({self._reason}); check the address and that a server runs there. "
                f"{RESUME[0].upper()}{RESUME[1:]}"
            ) from None
        else:
            usage = getattr(completion, "usage", None)
            counts = {name: getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens")}
            text = str(completion.choices[0].message.content or "")
            return Answer(text, {"find_answered": getattr(completion, "model", None), **counts})
        times = self.requests - before
        raise EndpointFailedError(
            f"judge {self.name!r}: the endpoint failed {times} times ({self._reason}); {RESUME}"
        ) from None

    @property
    def _address(self) -> str:
        """Without a user name and a password."""
        parts = urlsplit(self.base_url or OPENAI)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    def _status_reason(self, response: Any) -> str:
        if response.status_code == 401:
            return f"status 401: the key in {KEY} is not accepted"
        return f"status {response.status_code}: {self._redact(response.text)}"

    def _redact(self, reason: object) -> str:
        """One line without the key, which some endpoints repeat in their errors."""
        text = " ".join(str(reason).split())[:200] or type(reason).__name__
        return text.replace(self._key, "…") if self._key != NO_KEY else text


def _is_completion(response: Any) -> bool:
    try:
        choices = response.json()["choices"]
        return isinstance(choices[0]["message"], dict)
    except (ValueError, TypeError, KeyError, IndexError):
        return False


def unreachable(error: BaseException | None) -> bool:
    """Whether no connection can be made, and a second try would not help."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError | socket.gaierror | ssl.SSLCertVerificationError):
            return True
        if isinstance(error, OSError) and error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
            return True
        error = error.__cause__ or error.__context__
    return False


def _digest(address: str) -> str:
    return hashlib.sha256(address.rstrip("/").encode()).hexdigest()[:16]


def check_openai() -> None:
    if importlib.util.find_spec("openai") is None:
        raise UsageError(
            "endpoints need the package openai, which is not installed: "
            "pip install 'msrnn[judge]', or use a local model"
        )


class LocalJudge:
    """A local model, unbounded. Its answer is the likeliest of the three options, so that small models answer, too.

    name     in tables and records
    on_long  gets the length of the first prompt that is longer than the model's training length
    """

    def __init__(
        self, name: str, model: PreTrainedModel, tokenizer: Any, on_long: Callable[[int], object] = lambda _: None
    ) -> None:
        self.rnn, self.tokenizer, self.name = MultiStateRNN(model, FULL, None), tokenizer, name
        self.device, self.on_long, self.requests = str(model.device), on_long, 0
        self._known = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or math.inf
        self.key = {"judge": name, FINGERPRINT: self.rnn.spec.fingerprint["model"]}
        self.options = [list(tokenizer(option, add_special_tokens=False)["input_ids"]) for option in OPTIONS]

    def ask(self, prompt: str, most: int | None = None) -> Answer:
        self.requests += 1
        ids = prompt_ids(self.tokenizer, prompt, chat=bool(self.tokenizer.chat_template))
        if len(ids) > self._known:
            self._known = math.inf
            self.on_long(len(ids))
        log_likelihoods = self._log_likelihoods(ids)
        details = {"prompt_tokens": len(ids), LIKELIHOODS: log_likelihoods}
        return Answer(OPTIONS[max(range(len(OPTIONS)), key=lambda i: log_likelihoods[i])], details)

    def _log_likelihoods(self, ids: list[int]) -> list[float]:
        """The log-probability of each option after the prompt."""
        state, log_likelihoods = self.rnn.state(1), []
        first = self.rnn.read(torch.tensor([ids]), state, last_only=True)
        for option in self.options:
            rest = [self.rnn.read(torch.tensor([option[:-1]]), state.fork(1))] if len(option) > 1 else []
            logs = torch.cat([first, *rest], dim=1)[0].float().log_softmax(-1)
            log_likelihoods.append(float(logs[torch.arange(len(option)), torch.tensor(option)].sum()))
        return log_likelihoods
