"""Reports how far an evaluation is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Watch(NamedTuple):
    """Callbacks: how many tokens are left to read, what is being read (its `label` names it), how many tokens were
    read since the last call, and what earlier runs have done (how many, of how many, of what).
    """

    total: Callable[[int], object] = lambda _: None
    cell: Callable[[Any], object] = lambda _: None
    tokens: Callable[[int], object] = lambda _: None
    resumed: Callable[[int, int, str], object] = lambda *_: None
