"""Who is told how far an evaluation is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Watch(NamedTuple):
    """Told: how many tokens there are to read, what is being read (its `label` names it), how many tokens since."""

    total: Callable[[int], object] = lambda _: None
    cell: Callable[[Any], object] = lambda _: None
    tokens: Callable[[int], object] = lambda _: None
