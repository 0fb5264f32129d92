"""Checks of single values that come from outside. In Python `True` is a number; for a user it is not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from msrnn.errors import UsageError


def is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a finite number; a whole one may be too large for `math.isfinite`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def check_count(
    name: str, value: Any, least: int = 1, most: int | None = None, of: str = "", advice: str | None = None
) -> int:
    """Refuse anything but a whole number within bounds; `of` names what is counted."""
    if is_whole(value) and least <= value and (most is None or value <= most):
        return int(value)
    counted = f" of {of}" if of else ""
    message = f"must be a whole number{counted}, {bounds(least, most)}"
    raise UsageError(message, name=name, value=value, advice=advice)


def check_number(name: str, value: Any, least: float, most: float | None = None, advice: str | None = None) -> float:
    """Refuse anything but a finite number within bounds."""
    if is_number(value) and least <= value and (most is None or value <= most):
        return float(value)
    comma = "," if most is None else ""
    raise UsageError(f"must be a number{comma} {bounds(least, most)}", name=name, value=value, advice=advice)


def bounds(least: float, most: float | None) -> str:
    """Bounds in words."""
    return f"{least:,} or more" if most is None else f"from {least:,} to {most:,}"


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """Refuse anything but one of some words."""
    if isinstance(value, str) and value in choices:
        return value
    raise UsageError(f"must be one of {', '.join(choices)}", name=name, value=value)


def is_deeper(value: Any, levels: int) -> bool:
    """Whether objects and lists are nested in more than this number of levels; deeper ones are not visited."""
    found = [value]
    for _ in range(levels):
        found = [inner for one in found for inner in _list_inner(one)]
    return any(isinstance(one, Mapping | list | tuple) for one in found)


def _list_inner(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def check_folder(name: str, folder: Path) -> Path:
    """Refuse a path that cannot be made a folder, since it or one above it is a file."""
    found = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if found is None or found.is_dir():
        return folder
    message = "is a file" if found == folder else f"{found} is a file"
    raise UsageError(message, name=name, value=str(folder), advice="name a folder")
