"""Size: how many KV rows each layer may hold. One number, a number for each layer, or a mean that a budget divides.

Users write a policy and a size in many ways; `resolve` reads all of them, and the rest of the package passes values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from msrnn.bound import check_size
from msrnn.budget import Budget, load_budget
from msrnn.checks import is_whole
from msrnn.errors import FileError, UsageError
from msrnn.policy import FULL, Policy, split_weights


@dataclass(frozen=True)
class Size:
    """The number of KV rows of the layers of a model."""

    rows: int | tuple[int | None, ...]  # of every layer, or their mean; or of each layer, None: it keeps all
    budget: Budget | None = None  # how a mean is divided among the layers; None: equally

    def __post_init__(self) -> None:
        if self.budget is not None and not isinstance(self.budget, Budget):
            raise UsageError(
                "must be a Budget", name="budget", value=self.budget, advice="to name one, use Size.parse('512:upper')"
            )
        if isinstance(self.rows, list):
            object.__setattr__(self, "rows", tuple(self.rows))
        if not isinstance(self.rows, tuple):
            _check_rows(self.rows)
            return
        if self.budget is not None:
            raise UsageError(
                f"budget {self.budget.name!r} divides a mean size",
                name="size",
                value=list(self.rows),
                advice="give one number, or no budget",
            )
        if all(one is None for one in self.rows):
            raise UsageError(
                "bounds no layer",
                name="size",
                value=list(self.rows),
                advice="give a number for one of them, or use policy 'full'",
            )
        for layer, one in enumerate(self.rows):
            if one is not None:
                try:
                    _check_rows(one)
                except (UsageError, TypeError) as error:
                    raise type(error)(f"layer {layer}: {error}") from error

    @classmethod
    def parse(cls, size: SizeLike) -> Size:
        """Read a size as users write it.

        A number, or a list with a number or None for each layer. As text: "512", "[512, none]", or "512:BUDGET" with a
        budget's name or a file that `msrnn budget` wrote.
        """
        if isinstance(size, Size):
            return size
        if isinstance(size, str):
            text, colon, budget = size.partition(":")
            return cls(_parse_rows(text.strip()), load_budget(budget) if colon else None)
        if isinstance(size, int):
            return cls(size)
        if size is None or not isinstance(size, Sequence):
            raise _not_a_number(size)
        rows: tuple[Any, ...] = tuple(size)
        return cls(rows)

    @property
    def name(self) -> str:
        """The text that `parse` reads as this size."""
        rows = str(self.rows) if isinstance(self.rows, int) else str(list(self.rows))
        return rows if self.budget is None else f"{rows}:{self.budget.name}"

    def of_layers(self, windows: Sequence[int | None], linear: Sequence[bool]) -> list[int | None]:
        """The KV rows of each layer of a model; `windows` of its sliding layers, `linear`: layers without KV rows."""
        count = len(windows)
        if isinstance(self.rows, tuple):
            if len(self.rows) != count:
                raise UsageError(
                    f"size: {len(self.rows)} numbers, but this model has {count} layers; give one number for each"
                )
            return list(self.rows)
        sizes: list[int | None] = [self.rows] * count
        if self.budget is not None:
            chosen = find_budget_layers(windows, linear)
            for layer, rows in zip(chosen, self.budget.sizes(self.rows, len(chosen)), strict=True):
                sizes[layer] = rows
        return sizes


SizeLike = Size | int | str | Sequence[int | None] | None  # what users write; None: the policy is `full`


def _check_rows(rows: object) -> None:
    if not is_whole(rows):
        raise _not_a_number(rows)
    if rows < 1:
        raise UsageError("must be at least 1 KV row", name="size", value=rows)


def _not_a_number(rows: object) -> TypeError:
    return TypeError(f"size={rows!r}: must be a whole number of KV rows; only policy 'full' has no size")


def _parse_rows(text: str) -> int | tuple[int | None, ...]:
    try:
        if text.startswith("[") and text.endswith("]"):
            parts = [part.strip().lower() for part in text[1:-1].split(",")]
            return tuple(None if part == "none" else int(part) for part in parts)
        return int(text)
    except ValueError as error:
        raise UsageError(
            "must be a whole number, or a mean and a budget, as in 512:upper", name="size", value=text
        ) from error


def find_budget_layers(windows: Sequence[int | None], linear: Sequence[bool]) -> list[int]:
    """The layers that a budget is divided among: those without a sliding window; all with KV rows where each slides."""
    states = [i for i, one in enumerate(linear) if not one]
    return [i for i in states if windows[i] is None] or states


def layer_sizes(
    policy: Policy, size: Size | None, windows: Sequence[int | None], linear: Sequence[bool]
) -> list[int | None]:
    """The KV rows of each layer of a model; None: the layer is not bounded."""
    if size is None:
        return [None] * len(windows)
    sizes = size.of_layers(windows, linear)
    if size.budget is not None:
        _check_layers(policy, sizes, f"budget {size.budget.name!r} at size={size.rows}, ")
    return sizes


def _check_layers(policy: Policy, sizes: Sequence[int | None], where: str = "") -> None:
    for layer, rows in enumerate(sizes):
        if rows is not None:
            try:
                check_size(policy, rows)
            except UsageError as error:
                raise UsageError(f"{where}layer {layer}: {error}") from error


def resolve(policy: str | Policy, size: SizeLike) -> tuple[Policy, Size | None]:
    """Read a policy and a size, and check that they fit; `full` has no size, and ignores a given one.

    A budget may stand with either: ("echo:upper", 512) is ("echo", "512:upper").
    """
    value, budget = parse_policy(policy)
    if not value.evicts:
        if size is not None:
            Size.parse(size)  # refuses what no policy could have
        return FULL, None
    size = Size.parse(size)
    if budget is not None:
        if size.budget is not None:
            raise UsageError(f"policy {policy!r} and size {size.name}: both have a budget; leave one out")
        size = Size(size.rows, budget)
    if isinstance(size.rows, int):
        check_size(value, size.rows)
    else:
        _check_layers(value, size.rows)
    return value, size


def parse_policy(policy: str | Policy) -> tuple[Policy, Budget | None]:
    """Read a policy as users write it, with a budget or without: "tova", "echo:upper", "decay=0.9,budget=upper"."""
    if isinstance(policy, Policy):
        return policy, None
    name, budget = _split_budget(policy) if isinstance(policy, str) else (policy, None)
    value = Policy.parse(name)
    if budget is not None and not value.evicts:
        raise UsageError(f"policy {policy!r}: policy 'full' evicts nothing, so that a budget has nothing to divide")
    return value, None if budget is None else load_budget(budget)


def _split_budget(policy: str) -> tuple[str, str | None]:
    """The name without the budget, and the budget."""
    weighted, rest = split_weights(policy)
    name, colon, budget = rest.partition(":")
    if weighted or "=" not in name:
        return weighted + name, budget if colon else None
    fields = policy.split(",")
    budgets = [field for field in fields if field.lower().startswith("budget=")]
    if len(budgets) > 1:
        raise UsageError(f"policy {policy!r}: budget is given twice")
    if not budgets:
        return policy, None
    fields.remove(budgets[0])
    given = budgets[0].partition("=")[2]
    return ",".join(fields) or "decay=0", None if given.lower() == "none" else given


def joint_name(policy: Policy, budget: Budget | None) -> str:
    """The name of both in tables, where the number of rows stands elsewhere: "echo:upper"."""
    if budget is None:
        return policy.name
    by_fields = "=" in policy.without_weights.name
    return f"{policy.name},budget={budget.name}" if by_fields else f"{policy.name}:{budget.name}"


def joint_numbers(policy: Policy, budget: Budget | None) -> dict[str, Any] | None:
    """The identity of both in stored results, as JSON: their content, since the meaning of a name may change."""
    numbers = policy.numbers
    if numbers is not None and policy.learned:
        numbers["weights"] = _digest(Path(str(policy.weights)))
    return numbers if numbers is None or budget is None else {**numbers, "budget": budget.identity}


def _digest(path: Path) -> str:
    """The SHA-256 digest of a file of row weights, which is read again where it has changed."""
    try:
        about = path.stat()
        return _digest_once(path, about.st_ino, about.st_mtime_ns, about.st_ctime_ns, about.st_size)
    except OSError as error:
        raise FileError(f"cannot be read ({error.strerror})", path, advice="name a file of row weights") from error


@cache
def _digest_once(path: Path, *_about: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def refuse_budget(budget: Budget | None, reason: str) -> None:
    """Refuse a budget where layers must have one size."""
    if budget is not None:
        raise UsageError(f"budget {budget.name!r}: {reason}; leave out :{budget.name}")
