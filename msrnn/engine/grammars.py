"""Grammars: which tokens an answer may continue with, so that its text becomes what a constraint allows.

The library llguidance computes the allowed tokens, a set of bits for each answer and step. Its limits bound the time
and the memory of every grammar, also of one that was made to take long.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from time import thread_time
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from msrnn.engine.constraint import NAME, Constraint
from msrnn.errors import UsageError

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

KEPT = 128  # compiled grammars
# White space between JSON tokens: enough to indent, and no endless white space, which weak models write.
# The others are the usual ones, which a schema could change otherwise.
JSON_OPTIONS = {
    "whitespace_pattern": r"[ \n\r\t]{0,16}",
    "item_separator": ",",
    "key_separator": ":",
}
LIMITS = {  # a millisecond is 50,000 of the first, 14,000 of the second and 20,000 of the third
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,
    "max_lexer_states": 20_000,  # of 1 to 2 KB
    "max_grammar_size": 100_000,
    "verbose_errors": False,  # the text of a request belongs into no log
}
WORD, FULL_WORD = 32, 2**32 - 1  # bits
# The limits above do not bound ambiguous grammars, whose steps take longer and longer: seconds of this thread.
FIRST_SECONDS, TOKEN_SECONDS = 0.1, 0.002
SLOW = "following it takes too long"
MISSING = "structured answers need the package llguidance, which is not installed: pip install 'msrnn[serve]'"


class GrammarError(Exception):
    """A grammar became too complex while it was followed, or it does not allow a token that was read."""


class Matcher:
    """The place of an answer in its grammar."""

    def __init__(self, inner: LLMatcher, words: int, stops: Sequence[int]) -> None:
        self.inner, self.words, self.stops = inner, words, stops
        self.tokens, self.seconds = 0, 0.0

    def copy(self) -> Matcher:
        copied = Matcher(self.inner.deep_copy(), self.words, self.stops)
        copied.tokens, copied.seconds = self.tokens, self.seconds
        return copied

    def advance(self, token: int) -> None:
        """Follow a token of the answer."""
        begun = thread_time()
        if not self.inner.consume_token(token):
            raise GrammarError(self.inner.get_error())
        self.tokens, self.seconds = self.tokens + 1, self.seconds + thread_time() - begun
        if self.seconds > FIRST_SECONDS + TOKEN_SECONDS * self.tokens:
            raise GrammarError(SLOW)

    def clear_stops(self, row: NDArray[np.uint32]) -> None:
        """Rule out what ends the answer where its text is not complete; a grammar may name such tokens itself."""
        if not self.inner.is_accepting():
            for token in self.stops:
                row[token // WORD] &= np.uint32(FULL_WORD ^ (1 << token % WORD))


def find_allowed(matchers: Sequence[Matcher]) -> NDArray[np.int32]:
    """The tokens that may come next: bits [matchers, words of 32]."""
    from llguidance.numpy import fill_next_token_bitmask_par

    bits = np.zeros((len(matchers), matchers[0].words), np.int32)
    fill_next_token_bitmask_par(_threads(), [(matcher.inner, i) for i, matcher in enumerate(matchers)], bits)
    for matcher, row in zip(matchers, bits.view(np.uint32), strict=True):
        matcher.clear_stops(row)
        if matcher.inner.is_error() or not row.any():
            raise GrammarError(matcher.inner.get_error() or "no token may come next")
    return bits


@cache
def _threads() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor()


class Grammars:
    """The grammars of one tokenizer. Each is compiled once; the last ones are kept. Any thread may use them.

    vocabulary  ids that the model has
    stops       the tokens that end an answer; allowed where the text is complete, and only there
    """

    def __init__(self, tokenizer: Any, vocabulary: int, stops: Collection[int]) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._stops = sorted(token for token in stops if token < vocabulary)
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._known: LLTokenizer | None = None
        self._compiled: OrderedDict[Constraint, Matcher] = OrderedDict()

    def start(self, constraint: Constraint, tokens: Sequence[int] = ()) -> Matcher:
        """The beginning of an answer, or its place after `tokens`. A `UsageError` says why a constraint is refused."""
        matcher = self._find(constraint).copy()
        try:
            for token in tokens:
                matcher.advance(token)
        except GrammarError as error:
            slow = str(error) == SLOW
            reason = f"this {constraint.kind} is too complex" if slow else "does not allow the beginning of the answer"
            raise UsageError(reason, name=NAME) from error
        return matcher

    def warm_up(self) -> None:
        """Read the tokenizer, if answers can be structured: it takes seconds, in which no other thread computes."""
        if find_spec("llguidance") is not None:
            with suppress(UsageError):
                self._find(Constraint.json_object())

    def _find(self, constraint: Constraint) -> Matcher:
        """The beginning of every answer with this constraint; compiled if it is not known."""
        with self._lock:
            found = self._compiled.get(constraint)
        found = found or self._compile(constraint)  # meanwhile, answers with other grammars can begin
        with self._lock:
            self._compiled[constraint] = found
            self._compiled.move_to_end(constraint)
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return found

    def _compile(self, constraint: Constraint) -> Matcher:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            raise UsageError(MISSING) from error
        with self._reading:  # takes seconds
            self._known = self._known or self._read_tokenizer()
        limits = LLParserLimits(**LIMITS)  # type: ignore[arg-type]
        try:
            grammar = _write_grammar(constraint)
            failed, told = LLMatcher.validate_grammar_with_warnings(grammar, self._known, limits=limits)
        except ValueError as error:
            failed, told = True, [str(error)]
        if told:
            about = "cannot be followed" if failed else "would be followed in part only"
            raise UsageError(f"this {constraint.kind} {about} ({_shorten(told[0])})", name=NAME)
        inner = LLMatcher(self._known, grammar, log_level=0, limits=limits)
        compiled = Matcher(inner, -(-self._known.vocab_size // WORD), self._stops)
        try:
            find_allowed([compiled.copy()])
        except GrammarError as error:
            advice = "use a simpler one"
            raise UsageError(f"this {constraint.kind} is too complex", name=NAME, advice=advice) from error
        return compiled

    def _read_tokenizer(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        if self._tokenizer is None:
            raise UsageError("needs the text", name=NAME, advice="give the engine a tokenizer")
        if not self._stops:
            raise UsageError("this model has no stop token, by which a structured answer ends", name=NAME)
        vocabulary = max(self._vocabulary, len(self._tokenizer))
        try:
            return from_tokenizer(self._tokenizer, n_vocab=vocabulary, eos_token=self._stops)
        except Exception as error:  # tokenizers that it does not know; each in its own way
            kind = type(self._tokenizer).__name__
            raise UsageError(f"answers by {kind} cannot be structured ({_shorten(str(error))})", name=NAME) from error


def _write_grammar(constraint: Constraint) -> str:
    """The constraint in llguidance's own notation."""
    from llguidance import LLMatcher

    if constraint.kind == "json":
        return LLMatcher.grammar_from_json_schema(constraint.text, overrides=JSON_OPTIONS)  # type: ignore[arg-type]
    if constraint.kind == "regex":
        return LLMatcher.grammar_from_regex(constraint.text)
    if constraint.kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(constraint.text))))
    return LLMatcher.grammar_from_lark(constraint.text)


def _shorten(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0][:200] if lines else "no reason is given"
