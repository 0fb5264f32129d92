"""Choose the next token of every row, each by its own parameters.

Noise is a function of the answer's seed and of the token's number, and a row's parameters alone decide which operations
its logits go through, so an answer does not depend on who else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from msrnn.engine.requests import Logprobs, SamplingParams

_MASK = 2**64 - 1
COLDEST = 1e-6  # lower temperatures would overflow, and choose the most likely token as this one does


def mixed(number: int) -> int:
    """A 64-bit number that looks random (the finalizer of SplitMix64)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def uniform(seed: int, number: int) -> float:
    """A number in [0, 1) for the token of this number."""
    return (mixed(mixed(seed & _MASK) ^ number) >> 40) / 2**24  # as many bits as a float32 holds


class RowSampler:
    """The parameters of one answer, and the tokens that its penalties count."""

    def __init__(
        self, params: SamplingParams, seed: int, prompt: Sequence[int], vocabulary: int, device: torch.device
    ) -> None:
        self.params, self.seed, self.number = params, seed, params.continued
        self.counts: Tensor | None = None
        if params.penalizes:
            tokens = torch.as_tensor(prompt, device=device)
            generated = tokens[len(prompt) - params.continued :]
            self.counts = torch.bincount(generated, minlength=vocabulary).float()
            self.in_prompt = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self.in_prompt[tokens] = True
        if params.logit_bias:
            biases = [*params.logit_bias.items()]
            self.biased = torch.tensor([token for token, _ in biases], device=device)
            self.bias = torch.tensor([bias for _, bias in biases], dtype=torch.float32, device=device)

    @property
    def is_plain(self) -> bool:
        return self.counts is None and not self.params.logit_bias

    def adjusted(self, logits: Tensor) -> Tensor:
        """Logits [V] with penalties and biases."""
        params = self.params
        if self.counts is not None:
            generated = self.counts > 0
            penalty = torch.where(logits > 0, 1 / params.repetition_penalty, params.repetition_penalty)
            logits = torch.where(generated | self.in_prompt, logits * penalty, logits)
            logits = logits - params.presence_penalty * generated - params.frequency_penalty * self.counts
        if params.logit_bias:
            logits = logits.index_add(0, self.biased, self.bias)
        return logits

    def count(self, token: Tensor) -> None:
        """Count a token [1] that was chosen."""
        self.number += 1
        if self.counts is not None:
            self.counts.index_add_(0, token.clamp(min=0), self.counts.new_ones(1))


class Chosen:
    """The tokens of one step, on the device until they are asked for."""

    def __init__(self, tokens: Tensor, logprobs: dict[int, tuple[Tensor, Tensor, Tensor]]) -> None:
        self.tokens = tokens  # [B]; -1 where the logits are not numbers
        self._logprobs = logprobs

    def logprobs(self) -> dict[int, Logprobs]:
        """By row, for those rows that want them."""
        found = {}
        for row, (chosen, values, tokens) in self._logprobs.items():
            found[row] = Logprobs(float(chosen), [*zip(tokens.tolist(), values.tolist(), strict=True)])
        return found


def choose(logits: Tensor, rows: Sequence[RowSampler]) -> Chosen:
    """The next token of every row; logits [B, V], one sampler per row."""
    raw = logits.float()
    adjusted = raw
    if not all(row.is_plain for row in rows):
        adjusted = raw.clone()
        for i, row in enumerate(rows):
            if not row.is_plain:
                adjusted[i] = row.adjusted(raw[i])
    tokens = adjusted.argmax(-1)
    for limited in (False, True):
        some = [i for i, row in enumerate(rows) if row.params.temperature > 0 and _is_limited(row.params) == limited]
        if some:
            index = torch.tensor(some, device=logits.device)
            tokens[index] = _sampled(adjusted[index], [rows[i] for i in some], limited)
    tokens = tokens.masked_fill(raw.isnan().any(-1), -1)
    logprobs = {}
    for i, row in enumerate(rows):
        row.count(tokens[i : i + 1])
        if row.params.logprobs is not None:
            every = raw[i].log_softmax(-1)
            logprobs[i] = (every[tokens[i].clamp(min=0)], *every.topk(row.params.logprobs))
    return Chosen(tokens, logprobs)


def _is_limited(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _sampled(logits: Tensor, rows: Sequence[RowSampler], limited: bool) -> Tensor:
    """Tokens [B], each by its own number in [0, 1): the first token at which the summed probabilities exceed it."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device)[:, None]

    probs = (logits / column([max(row.params.temperature, COLDEST) for row in rows])).softmax(-1)
    order = None
    if limited:
        probs, order = probs.sort(dim=-1, descending=True, stable=True)
        vocabulary = logits.shape[-1]
        rank = torch.arange(vocabulary, device=logits.device)
        probs = probs.masked_fill(rank >= column([row.params.top_k or vocabulary for row in rows]), 0)
        probs = probs / probs.sum(-1, keepdim=True)
        # A token is among those that reach top_p together, if the ones before it do not.
        top_p = column([row.params.top_p for row in rows])
        probs = probs.masked_fill((probs.cumsum(-1) - probs >= top_p) & (top_p < 1), 0)
        probs = probs.masked_fill(probs < column([row.params.min_p for row in rows]) * probs[:, :1], 0)
    summed = probs.cumsum(-1)
    noise = column([uniform(row.seed, row.number) for row in rows])
    index = (summed <= noise * summed[:, -1:]).sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    return (index if order is None else order.gather(-1, index))[:, 0]
