"""Requests: sampling parameters, the prompt, the answers so far, and events."""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from msrnn.checks import check_count, check_number, is_number, is_whole
from msrnn.engine.constraint import NAME, Constraint
from msrnn.engine.grammars import Matcher
from msrnn.engine.retention import Retention
from msrnn.engine.session_id import SessionId
from msrnn.errors import FileError, SessionError, UsageError, show

FinishReason = Literal["stop", "length", "cancelled", "error"]
MOST_LOGPROBS = 20
MOST = 2**31 - 1  # of every whole number but the seed
MOST_STOPS, LONGEST_STOP = 16, 1000  # strings, and characters of one: every answer is compared with them at every step
MOST_TOKEN_IDS = 1000  # in logit_bias and stop_token_ids
LEAST_BIAS, MOST_BIAS = -100, 100
COUNTS: dict[str, tuple[int, int]] = {
    "max_tokens": (0, MOST),
    "min_tokens": (0, MOST),
    "n": (1, MOST),
    "top_k": (0, MOST),
    "continued": (0, MOST),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, MOST_LOGPROBS),
    "prompt_logprobs": (0, MOST_LOGPROBS),
}
OPTIONAL = ("seed", "logprobs", "prompt_logprobs")  # which may be None
NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (1e-6, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
NOT_FINITE_ERROR = "the model computed numbers that are not finite"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request. Names are those of other engines; a value out of range raises a UsageError.

    max_tokens          of the answer; 0: the prompt is read, and nothing is generated
    min_tokens          of the answer: before, no stop token is sampled, and no stop string ends it
    temperature         0: the most likely token, always
    top_k               sample among this many tokens; 0: among all
    top_p               sample among the most likely tokens that have this probability together
    min_p               sample among tokens at least this likely, relative to the most likely one
    repetition_penalty  divides the logits of tokens of the prompt and the answer, or multiplies them where negative
    presence_penalty    is subtracted from the logits of tokens of the answer
    frequency_penalty   the same, once for each time that the token was generated
    logit_bias          is added to the logits of these token ids
    seed                two answers with one seed are the same, up to rounding, which depends on the number of answers
                        at once; without a seed, each has another
    continued           the last tokens of the prompt that are the beginning of the answer: noise and penalties
                        continue after them, as if they had been generated
    stop                the answer ends before any of these strings, at most 16 of 1,000 characters
    stop_token_ids      the answer ends before any of these tokens, as before the model's own stop tokens
    ignore_eos          continue after the model's own stop tokens
    logprobs            also return this many of the most likely tokens at every step; 0: the generated one alone
    prompt_logprobs     the same for every token of the prompt; the prompt is then read from its beginning
    n                   answers to the same prompt
    constraint          what the text of the answer may be: JSON of a schema, or a regular expression, for example
    shown_tokens        special tokens whose names are in the text of the answer, which has no others
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    continued: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    constraint: Constraint | None = None
    shown_tokens: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name, (least, most) in COUNTS.items():
            if getattr(self, name) is not None or name not in OPTIONAL:
                check_count(name, getattr(self, name), least, most)
        for name, within in NUMBERS.items():
            check_number(name, getattr(self, name), *within)
        if self.min_tokens > self.max_tokens:
            limit = f"must be at most max_tokens, which is {self.max_tokens}"
            raise UsageError(limit, name="min_tokens", value=self.min_tokens)
        if not _is_list(self.stop) or not all(isinstance(text, str) and text for text in self.stop):
            raise UsageError("must be a list of strings, none of them empty", name="stop", value=self.stop)
        for name in ("stop_token_ids", "shown_tokens"):
            if not _is_list(getattr(self, name)):
                raise UsageError("must be a list of token ids", name=name, value=getattr(self, name))
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError("must be a dict of token ids and numbers", name="logit_bias", value=self.logit_bias)
        if len(self.stop) > MOST_STOPS or any(len(text) > LONGEST_STOP for text in self.stop):
            longest = max(map(len, self.stop))
            raise UsageError(
                f"{len(self.stop)} strings, the longest of {longest:,} characters",
                name="stop",
                advice=f"at most {MOST_STOPS} strings of {LONGEST_STOP:,} characters",
            )
        for name in ("stop_token_ids", "logit_bias", "shown_tokens"):
            if (count := len(getattr(self, name))) > MOST_TOKEN_IDS:
                raise UsageError(f"{count:,} tokens", name=name, advice=f"at most {MOST_TOKEN_IDS:,}")
        for token, bias in self.logit_bias.items():
            if not is_number(bias) or not LEAST_BIAS <= bias <= MOST_BIAS:
                limits = f"must be from {LEAST_BIAS} to {MOST_BIAS}"
                raise UsageError(f"token {token} has {show(bias)}; {limits}", name="logit_bias")
        if self.constraint is not None:
            self._check_constraint()

    def _check_constraint(self) -> None:
        if not isinstance(self.constraint, Constraint):
            advice = "make one: Constraint.json(schema)"
            raise UsageError("must be a Constraint", name=NAME, value=self.constraint, advice=advice)
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self, name):
                reason = "an answer with a constraint ends where its text is complete"
                raise UsageError(reason, name=NAME, advice=f"leave {name} out")

    def check_tokens(self, vocabulary: int) -> None:
        """Refuse ids that the model does not have."""
        for name, tokens in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", self.logit_bias),
            ("shown_tokens", self.shown_tokens),
        ):
            for token in tokens:
                if not is_whole(token) or not 0 <= token < vocabulary:
                    raise UsageError(f"token {token!r}: this model has ids 0 to {vocabulary - 1}", name=name)

    def check_session(self) -> None:
        """Refuse what a session cannot answer."""
        if self.n > 1:
            raise UsageError(
                "a session continues with one answer", name="n", value=self.n, advice="fork it, or ask for one"
            )
        if self.max_tokens == 0:
            raise UsageError(
                "a session continues with an answer", name="max_tokens", value=0, advice="ask for one token or more"
            )
        if self.prompt_logprobs is not None:
            advice = "ask without a session"
            raise UsageError(
                "not known in a session", name="prompt_logprobs", value=self.prompt_logprobs, advice=advice
            )

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _is_list(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str | bytes)


class Logprobs(NamedTuple):
    """Log probabilities at one step, of the model itself: before temperature, penalties and limits."""

    chosen: float
    top: list[tuple[int, float]]  # token, log probability; the most likely first


@dataclass(eq=False)
class Answer:
    """One answer, as far as it has been generated. Stop tokens and stop strings are not in it."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or string that ended it, if not the model's own
    logprobs: list[Logprobs] = field(default_factory=list)
    ending: tuple[int, Logprobs] | None = None  # the stop token that ended it, if log probabilities are wanted
    error: str | None = None
    error_code: str | None = None  # for programs; None: the engine's own fault


@dataclass(eq=False)
class Request:
    """A prompt and its answers. In a session, the prompt is what is new."""

    prompt: Sequence[int]
    params: SamplingParams
    answers: list[Answer] = field(default_factory=list)
    session: SessionId | None = None  # the session that the prompt continues
    turns: int = 0  # finished turns of the session that the prompt follows
    created: float | None = None  # when that session was created: a newer session may have the same name
    cached_tokens: int = 0  # prompt tokens served from the prefix cache or the session
    owner: str = ""  # requests of different owners share no cached prefixes
    cancelled: bool = False
    stopped: bool = False
    prompt_logprobs: list[Logprobs | None] = field(default_factory=list)  # None for the first token
    protect: int = 0  # the first tokens of the prompt, which are not evicted until the session's next turn
    keeps_protected: bool = False  # whether tokens that earlier turns have protected stay so
    size: int | None = None  # KV rows per layer that its state may hold; None: as many as the engine's
    beginning: str = ""  # a name for how the session begins, which it keeps if this is its first turn
    retention: int = 0  # one event in this many tokens has the retention, and the last one; 0: none
    begun: float | None = None  # when its prefill began, on the monotonic clock
    matcher: Matcher | None = None  # where its answers begin in the grammar of their constraint

    def __post_init__(self) -> None:
        if self.params.constraint is not None and self.matcher is None:
            raise UsageError("a request with a constraint is made by Engine.request", name=NAME)
        self.answers = [Answer() for _ in range(self.params.n)]
        self.seed = secrets.randbits(63) if self.params.seed is None else self.params.seed

    @property
    def finished(self) -> bool:
        return all(answer.finish_reason for answer in self.answers)

    def fail(self, error: str, code: str | None = None) -> list[Event]:
        """End the answers that are not finished with an error."""
        return self.end("error", error, code)

    def end_unanswered(self) -> list[Event]:
        """End the answers, after the prompt was read, if none is to be generated or the prompt could not be scored."""
        if any(scored is not None and math.isnan(scored.chosen) for scored in self.prompt_logprobs):
            return self.fail(NOT_FINITE_ERROR)
        return self.end("length") if self.params.max_tokens == 0 else []

    def end(self, reason: FinishReason, error: str | None = None, code: str | None = None) -> list[Event]:
        """End the answers that are not finished."""
        events = []
        for number, answer in enumerate(self.answers):
            if answer.finish_reason is None:
                answer.finish_reason, answer.error, answer.error_code = reason, error, code
                events.append(Event(self, number, None, "", None, reason))
        return events

    def cancel(self) -> None:
        """Free its batch slots at the next step; may be called from any thread."""
        self.cancelled = True

    def stop(self) -> None:
        """End its answers at the next step, and keep their turns; before the first token, this is `cancel`.

        May be called from any thread.
        """
        self.stopped = True


def explain(error: BaseException) -> tuple[str, str | None]:
    """The text of an error for a client, and its code: without paths of this machine and texts of other requests."""
    if isinstance(error, SessionError):
        return str(error), error.code
    if isinstance(error, FileError):
        return error.problem, None
    if isinstance(error, UsageError):
        return str(error), None
    if isinstance(error, OSError) and error.strerror:
        return error.strerror, None
    return f"internal error ({type(error).__name__})", None


class Event(NamedTuple):
    """The tokens and text that one step has added to an answer."""

    request: Request
    number: int  # of the answer among the request's
    token: int | None  # None: nothing but text that was held back, or the end
    text: str
    logprobs: Logprobs | None
    finish_reason: FinishReason | None
    retention: Retention | None = None  # which tokens the state holds, after `seen` tokens
