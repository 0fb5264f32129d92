"""Sample the next token of every sequence of a batch, each with its own parameters.

Noise is a function of the answer's seed and of the token's number, and the operations on a sequence's logits depend on
its own parameters only. So an answer does not depend on the other sequences of the batch, up to the rounding of the
model's own matrix products, which depends on the size of the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from msrnn.core.device_memory import on_device
from msrnn.engine.executor import FAILED, NOT_FINITE, TOO_COMPLEX, SamplerSpec
from msrnn.engine.grammars import WORD, GrammarError, Matcher, find_allowed
from msrnn.engine.noise import uniform
from msrnn.engine.requests import Logprobs, SamplingParams

_log = logging.getLogger(__name__)
COLDEST = 1e-6  # lower temperatures would overflow, and choose the most likely token as this one does


class SequenceSampler:
    """The parameters of one answer, the tokens that its penalties count and that end it, and its place in a grammar."""

    def __init__(self, spec: SamplerSpec, vocabulary: int, device: torch.device) -> None:
        params, prompt = spec.params, spec.prompt
        self.params, self.seed, self.number, self.matcher = params, spec.seed, params.continued, spec.matcher
        self._unread: tuple[Chosen, int] | None = None  # the last token's step and sequence, for the matcher
        self.counts: Tensor | None = None
        if params.penalizes:
            tokens = on_device(prompt, device)
            generated = tokens[len(prompt) - params.continued :]
            self.counts = torch.zeros(vocabulary, device=device)
            self.counts.index_add_(0, generated, torch.ones(len(generated), device=device))
            self.in_prompt = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self.in_prompt[tokens] = True
        if params.logit_bias:
            biases = [*params.logit_bias.items()]
            self.biased = on_device([token for token, _ in biases], device)
            self.bias = on_device([bias for _, bias in biases], device, torch.float32)
        self.stops: Tensor | None = None
        if params.min_tokens and (known := [token for token in spec.stops if token < vocabulary]):
            self.stops = on_device(known, device)

    @property
    def is_plain(self) -> bool:
        return self.counts is None and not self.params.logit_bias and not self.must_continue

    @property
    def must_continue(self) -> bool:
        """Whether the next token cannot end the answer."""
        return self.stops is not None and self.number - self.params.continued < self.params.min_tokens

    @property
    def counts_only(self) -> bool:
        """Whether a token depends on how many there are before it, and not on which."""
        return self.counts is None and self.matcher is None

    def adjust(self, logits: Tensor) -> Tensor:
        """Logits [V] with penalties and biases; those of tokens that cannot be chosen are -inf."""
        params = self.params
        if self.counts is not None:
            generated = self.counts > 0
            penalty = torch.where(logits > 0, 1 / params.repetition_penalty, params.repetition_penalty)
            logits = torch.where(generated | self.in_prompt, logits * penalty, logits)
            logits = logits - params.presence_penalty * generated - params.frequency_penalty * self.counts
        if params.logit_bias:
            logits = logits.index_add(0, self.biased, self.bias)
        if self.stops is not None and self.must_continue:
            logits = logits.index_fill(0, self.stops, -torch.inf)
        return logits

    def count(self, chosen: Chosen, i: int) -> None:
        """Count the token that was chosen for sequence i."""
        self.number += 1
        if self.counts is not None:
            self.counts.index_add_(0, chosen.tokens[i : i + 1].clamp(min=0), self.counts.new_ones(1))
        if self.matcher is not None:
            self._unread = chosen, i

    def advance(self) -> Matcher:
        """The place in the grammar after the last token, which may still be on its way from the device."""
        assert self.matcher is not None
        if self._unread is not None:
            (chosen, i), self._unread = self._unread, None
            token = chosen.on_host()[0][i]
            if token >= 0:
                self.matcher.advance(token)
        return self.matcher


class Chosen:
    """The tokens of one step: on the device for the next step, and on their way to the host.

    tokens    [B]; a key of NO_TOKEN where there is none
    wanted    the sequences that want log probabilities, and of how many of the most likely tokens
    logprobs  of these sequences: those of their tokens [R], and the most likely ones, [R, K] with their tokens
    """

    def __init__(self, tokens: Tensor, wanted: Sequence[tuple[int, int]], logprobs: Sequence[Tensor]) -> None:
        self.tokens, self._wanted = tokens, wanted
        self._copies = [tensor.to("cpu", non_blocking=True) for tensor in (tokens, *logprobs)]
        self._copied = torch.cuda.Event() if tokens.is_cuda else None
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(tokens.device))

    @cached_property
    def _lists(self) -> list[Any]:
        if self._copied is not None:
            self._copied.synchronize()
        return [copy.tolist() for copy in self._copies]

    def on_host(self) -> tuple[list[int], dict[int, Logprobs]]:
        """The tokens, and log probabilities by sequence; waits for this step, and not for later ones."""
        tokens, *logprobs = self._lists
        found = {}
        for (i, most), chosen, values, top in zip(self._wanted, *logprobs, strict=True):
            found[i] = Logprobs(chosen, [*zip(top, values, strict=True)][:most])
        return tokens, found


def choose(logits: Tensor, samplers: Sequence[SequenceSampler]) -> Chosen:
    """The next token of every sequence; logits [B, V] and B samplers. The host does not wait for the device."""
    raw = logits.float()
    try:
        tokens = _next_tokens(raw, samplers)
    except Exception:  # caused by one sequence; the others continue
        tokens = torch.cat([_next_token(raw[i : i + 1], sampler) for i, sampler in enumerate(samplers)])
    tokens = tokens.masked_fill((raw.isnan() | raw.isposinf()).any(-1), NOT_FINITE)
    wanted = [(i, one.params.logprobs) for i, one in enumerate(samplers) if one.params.logprobs is not None]
    chosen = Chosen(tokens, wanted, _logprobs(raw, tokens, wanted) if wanted else ())
    for i, sampler in enumerate(samplers):
        sampler.count(chosen, i)
    return chosen


class ChosenAt:
    """One of the tokens of a step, as a step of its own."""

    def __init__(self, chosen: Chosen, at: int) -> None:
        self._chosen, self._at = chosen, at

    def on_host(self) -> tuple[list[int], dict[int, Logprobs]]:
        tokens, logprobs = self._chosen.on_host()
        return [tokens[self._at]], {0: logprobs[self._at]} if self._at in logprobs else {}


def choose_ahead(logits: Tensor, sampler: SequenceSampler) -> tuple[Tensor, list[ChosenAt]]:
    """The next tokens of one sequence, from logits [T, V] after each token -> tokens [T], and each alone.

    Only where the sampler `counts_only`, which then has counted none of them.
    """
    samplers = [copy(sampler) for _ in logits]
    for i, one in enumerate(samplers):
        one.number += i
    chosen = choose(logits, samplers)
    return chosen.tokens, [ChosenAt(chosen, i) for i in range(len(samplers))]


def _next_token(logits: Tensor, sampler: SequenceSampler) -> Tensor:
    try:
        return _next_tokens(logits, [sampler])
    except GrammarError:
        return torch.full((1,), TOO_COMPLEX, device=logits.device)
    except Exception as error:
        _log.error("a token could not be sampled: %s", type(error).__name__)  # the message may hold the request's text
        return torch.full((1,), FAILED, device=logits.device)


def _next_tokens(raw: Tensor, samplers: Sequence[SequenceSampler]) -> Tensor:
    adjusted = raw
    if not all(sampler.is_plain for sampler in samplers):
        adjusted = raw.clone()
        for i, sampler in enumerate(samplers):
            if not sampler.is_plain:
                adjusted[i] = sampler.adjust(raw[i])
    constrained = [i for i, sampler in enumerate(samplers) if sampler.matcher is not None]
    if constrained:
        index = on_device(constrained, raw.device)
        allowed = _find_allowed([samplers[i].advance() for i in constrained], raw)
        left = adjusted[index].masked_fill(~allowed, -torch.inf)
        adjusted, stuck = adjusted.index_copy(0, index, left), left.amax(-1) == -torch.inf
    tokens = adjusted.argmax(-1)
    every = [sampler.params for sampler in samplers]
    for limited in (False, True):
        some = [i for i, params in enumerate(every) if params.temperature > 0 and _is_limited(params) == limited]
        if some:
            drawn = on_device(some, raw.device)
            tokens[drawn] = _sample(adjusted[drawn], [samplers[i] for i in some], limited)
    if constrained:
        tokens[index] = tokens[index].masked_fill(stuck, TOO_COMPLEX)
    return tokens


def _find_allowed(matchers: Sequence[Matcher], logits: Tensor) -> Tensor:
    """Which tokens may come next: [matchers, V]. While the device computes the logits, the host finds them."""
    words = torch.from_numpy(find_allowed(matchers))
    if logits.is_cuda:
        words = words.pin_memory().to(logits.device, non_blocking=True)
    bits = words[..., None] >> torch.arange(WORD, dtype=words.dtype, device=words.device)
    return (bits & 1).bool().flatten(1)[:, : logits.shape[-1]]


def _logprobs(logits: Tensor, tokens: Tensor, wanted: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Of these sequences: the log probabilities of their tokens, and the most likely ones with their tokens."""
    index = on_device([i for i, _ in wanted], logits.device)
    every = logits[index].log_softmax(-1)
    chosen = every.gather(-1, tokens[index].clamp(min=0)[:, None])[:, 0]
    return (chosen, *every.topk(min(max(most for _, most in wanted), every.shape[-1])))


def _is_limited(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _sample(logits: Tensor, samplers: Sequence[SequenceSampler], limited: bool) -> Tensor:
    """Tokens [B], each by its own number in [0, 1): the first token at which the summed probabilities exceed it."""

    def column(values: list[float]) -> Tensor:
        return on_device(values, logits.device, torch.float32)[:, None]

    probs = (logits / column([max(one.params.temperature, COLDEST) for one in samplers])).softmax(-1)
    order = None
    if limited:
        probs, order = probs.sort(dim=-1, descending=True, stable=True)
        vocabulary = logits.shape[-1]
        rank = torch.arange(vocabulary, device=logits.device)
        top_k = column([min(one.params.top_k or vocabulary, vocabulary) for one in samplers])
        probs = probs.masked_fill(rank >= top_k, 0)
        probs = probs / probs.sum(-1, keepdim=True)
        # A token is among those that reach top_p together, if the ones before it do not.
        top_p = column([one.params.top_p for one in samplers])
        probs = probs.masked_fill((probs.cumsum(-1) - probs >= top_p) & (top_p < 1) & (rank > 0), 0)
        probs = probs.masked_fill(probs < column([one.params.min_p for one in samplers]) * probs[:, :1], 0)
    summed = probs.cumsum(-1)
    noise = column([uniform(one.seed, one.number) for one in samplers])
    index = (summed <= noise * summed[:, -1:]).sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    if any(one.matcher is not None for one in samplers):  # sums in parallel may not rise evenly where nothing is added
        index = torch.where(probs.gather(-1, index) > 0, index, probs.argmax(-1, keepdim=True))
    return (index if order is None else order.gather(-1, index))[:, 0]
