"""Log probabilities of a prompt's own tokens, gathered while the prompt is read."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from msrnn.core.device_memory import on_device
from msrnn.engine.requests import Logprobs

SCORED = 64  # tokens whose log-softmax is held at once, in float32


def score_tokens(logits: Tensor, tokens: Sequence[int], most: int) -> list[Logprobs]:
    """Logits [T, V] before each of T tokens -> the tokens' log probabilities, and the `most` most likely tokens."""
    found: list[Logprobs] = []
    targets = on_device(tokens, logits.device)
    for part, some in zip(logits.split(SCORED), targets.split(SCORED), strict=True):
        every = part.float().log_softmax(-1)
        chosen = every.gather(-1, some[:, None])[:, 0]
        values, top = every.topk(min(most, every.shape[-1]))
        for one, likely, ids in zip(chosen.tolist(), values.tolist(), top.tolist(), strict=True):
            found.append(Logprobs(one, [*zip(ids, likely, strict=True)]))
    return found


def score_block(block: Tensor, before: Tensor | None, tokens: Sequence[int], most: int) -> list[Logprobs | None]:
    """The log probabilities of a block's tokens, from its logits [T, V] and those before it [V].

    None for the first token of a text, which nothing predicts.
    """
    first: list[Logprobs | None] = [None] if before is None else [*score_tokens(before[None], tokens[:1], most)]
    return [*first, *(score_tokens(block[:-1], tokens[1:], most) if len(tokens) > 1 else [])]
