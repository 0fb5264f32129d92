"""A judge behind an OpenAI-compatible endpoint. The key is in the environment, and goes nowhere but to the endpoint."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import random
import socket
import ssl
import time
from collections.abc import Callable
from json import JSONDecodeError
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from msrnn.errors import UsageError

KEY, ADDRESS = "OPENAI_API_KEY", "OPENAI_BASE_URL"
OPENAI = "https://api.openai.com/v1"
ANSWER = 32  # tokens: a single phrase
RETRIES, LONGEST = 6, 60.0  # of one request, and seconds between two of them
GO_ON = "check the address and that a server runs there. What was answered is kept: run the same command to go on"
NO_KEY = "none"  # what servers of one's own are sent


class Answer(NamedTuple):
    text: str
    told: dict[str, Any]  # what the endpoint says of it


class NoCompletionError(Exception):
    """The endpoint answered, but with something else."""


class Endpoint:
    """Asks one prompt at a time. Whatever may pass is tried again, later and later; `on_request` hears of each try."""

    device = "cpu"

    def __init__(
        self,
        name: str,
        base_url: str | None = None,
        timeout: float = 60.0,
        on_wait: Callable[[str], object] = lambda _: None,
        pause: float = 1.0,
    ) -> None:
        self.base_url = base_url or os.environ.get(ADDRESS) or None
        self.name, self.timeout = name, timeout
        # The address itself is written nowhere: it may have a password in it.
        self.key = {"judge": name, "endpoint": _digest(self.base_url or OPENAI)}
        self.on_wait, self.pause = on_wait, pause
        self._key = os.environ.get(KEY) or (NO_KEY if self.base_url else "")
        self._client: Any = None

    def open(self) -> None:
        """Before anything is asked, which alone needs the package and the key; refuses to be without them."""
        check_openai()
        from openai import OpenAI

        if not self._key:
            raise UsageError(
                f"--judge {self.name}: set {KEY} in the environment, or give --base-url of a server of your own"
            )
        self._client = OpenAI(api_key=self._key, base_url=self.base_url, timeout=self.timeout, max_retries=0)

    def ask(self, prompt: str, on_request: Callable[[], None]) -> Answer:
        if self._client is None:
            self.open()
        from openai import APIConnectionError, APIStatusError

        for tries in range(RETRIES + 1):
            on_request()
            try:
                return self._asked(prompt)
            except (APIConnectionError, NoCompletionError) as error:  # a time-out is a connection error, too
                if (reason := unreachable(error)) is not None:
                    raise UsageError(f"--base-url {self._address}: {reason}; {GO_ON}") from None
                reason, wait = self._told(error), None
            except APIStatusError as error:
                reason, wait = self._told(error), error.response.headers.get("retry-after")
                if error.status_code not in (408, 409, 429) and error.status_code < 500:
                    raise UsageError(f"--judge {self.name}: the endpoint refuses ({reason})") from None
            if tries < RETRIES:
                self._wait(tries, reason, wait)
        kept = "what was answered is kept, go on later"
        raise UsageError(f"--judge {self.name}: the endpoint failed {RETRIES + 1} times ({reason}); {kept}")

    def _asked(self, prompt: str) -> Answer:
        from openai import APIResponseValidationError

        messages: Any = [{"role": "user", "content": prompt}]
        try:
            completion: Any = self._client.chat.completions.create(
                model=self.name, messages=messages, temperature=0, max_tokens=ANSWER
            )
            text = str(completion.choices[0].message.content or "")
        except (JSONDecodeError, APIResponseValidationError, AttributeError, IndexError, TypeError) as error:
            raise NoCompletionError("an answer that is no completion") from error
        usage = getattr(completion, "usage", None)
        counted = {name: getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens")}
        return Answer(text, {"answered_by": getattr(completion, "model", None), **counted})

    def _wait(self, tries: int, reason: str, told: str | None) -> None:
        """Twice as long each time, with some chance in it; or as long as the endpoint says."""
        seconds = self.pause * 2**tries * random.uniform(0.75, 1.25)
        if told is not None and told.replace(".", "", 1).isdecimal():
            seconds = float(told)
        seconds = min(seconds, LONGEST)
        self.on_wait(f"{reason}; trying again in {seconds:.0f} s")
        time.sleep(seconds)

    @property
    def _address(self) -> str:
        """Without a name and a password, which some have in it."""
        parts = urlsplit(self.base_url or OPENAI)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    def _told(self, error: Exception) -> str:
        """In one line, without the key: endpoints like to repeat what they refuse."""
        status = getattr(error, "status_code", None)
        if status == 401:
            return f"status 401: the key in {KEY} is not accepted"
        text = " ".join(str(error).split())[:200] or type(error).__name__
        return text.replace(self._key, "…") if self._key != NO_KEY else text


def unreachable(error: BaseException | None) -> str | None:
    """Why no connection was made, where a second try would not help; None: it might."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError | socket.gaierror | ssl.SSLCertVerificationError):
            return f"no connection ({error})"
        if isinstance(error, OSError) and error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
            return f"no connection ({error})"
        error = error.__cause__ or error.__context__
    return None


def _digest(address: str) -> str:
    return hashlib.sha256(address.rstrip("/").encode()).hexdigest()[:16]


def check_openai() -> None:
    if importlib.util.find_spec("openai") is None:
        raise UsageError(
            "endpoints are asked through the package openai, which is not installed: "
            "pip install 'msrnn[judge]', or judge by a local model, with --model"
        )
