"""The definition on texts that can be checked by hand; test_identities.py compares everything else with it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from msrnn.bound import Bound
from msrnn.core.slots import HELD
from msrnn.policy import Policy
from msrnn.reference import recurrent

# Keys are unit vectors, so that a query's first numbers are its scores; values are the token's number.
KEYS = torch.eye(4)[None]
VALUES = torch.arange(4.0)[None, :, None]


def read(scores: list[list[float]], bound: Bound | None) -> tuple[list[float], list[int]]:
    """Outputs, and the last step that saw each token."""
    query: Tensor = torch.tensor(scores)[None]
    found = recurrent(query, KEYS, VALUES, bound, scale=1.0)
    return found.output[0, :, 0].tolist(), found.evicted_at[0].tolist()


EQUAL = [[0.0] * 4] * 4


def test_without_a_bound_every_token_is_seen() -> None:
    outputs, times = read(EQUAL, None)
    assert outputs == [0.0, 0.5, 1.0, 1.5]
    assert times == [HELD] * 4


def test_a_window_evicts_the_oldest() -> None:
    """The token that is evicted at a step is still seen by it."""
    outputs, times = read(EQUAL, Bound(Policy.parse("window"), 2))
    assert outputs == [0.0, 0.5, 1.0, 2.0]
    assert times == [2, 3, HELD, HELD]


def test_tova_evicts_the_least_attended() -> None:
    low = -math.log(2)
    _, times = read([[0, 0, 0, 0], [0, 0, 0, 0], [0, low, 0, 0], [low, 0, 0, 0]], Bound(Policy.parse("tova"), 2))
    assert times == [3, 2, HELD, HELD]


def test_ties_evict_the_older() -> None:
    assert read(EQUAL, Bound(Policy.parse("tova"), 3))[1] == [3, HELD, HELD, HELD]


def test_protected_tokens_stay() -> None:
    assert read(EQUAL, Bound(Policy.parse("tova+1"), 2))[1] == [HELD, 2, 3, HELD]
