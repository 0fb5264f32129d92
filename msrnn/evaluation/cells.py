"""The cells of a table: which policy, and how many KV rows per layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from msrnn.budget import Budget
from msrnn.checks import is_whole
from msrnn.errors import UsageError
from msrnn.evaluation.future import Future
from msrnn.evaluation.recalled import Recalled, split_name
from msrnn.evaluation.report import Value
from msrnn.evaluation.store import Record
from msrnn.policy import FULL as FULL_POLICY
from msrnn.policy import Policy
from msrnn.scored import refuse_scored
from msrnn.size import joint_name, joint_numbers, parse_policy, resolve

FULL = FULL_POLICY.name  # the unbounded model on whole texts
BASELINE = "baseline"  # the unbounded model on pieces of `size` tokens
TRUNCATED = "truncated"  # the unbounded model on the first `size` tokens
TOVA = "tova"
UNBOUNDED = (FULL, BASELINE, TRUNCATED)
FUTURE = "future"  # each layer evicts by the true future: for perplexity alone


class Cell(NamedTuple):
    """An entry of a table: the name of its row, and the number of its column."""

    policy: str  # a policy, with its budget and its recall if it has them, one of `UNBOUNDED`, or `FUTURE`
    size: int | None  # rows per layer, or their mean; None: full, which has no limit

    @property
    def recalled(self) -> Recalled | None:
        """What comes back of the evicted tokens; None: nothing."""
        return split_name(self.policy)[1]

    @property
    def without_recall(self) -> Cell:
        """The same policy and size, and nothing comes back."""
        return Cell(split_name(self.policy)[0], self.size)

    @property
    def label(self) -> str:
        policy, recalled = split_name(self.policy)
        return policy if self.size is None else f"{policy} {self.size}{recalled or ''}"

    @property
    def keeps(self) -> int | None:
        """The longest text of which nothing is evicted; None: any. Under a budget 0: it depends on the model."""
        bounded = self._policy
        return 0 if bounded is not None and bounded[1] is not None else self.size

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the `MultiStateRNN` that computes this entry."""
        policy, size = resolve(FULL if self.policy in UNBOUNDED else split_name(self.policy)[0], self.size)
        return {"policy": policy, "size": size, **(self.recalled.options if self.recalled else {})}

    @property
    def future(self) -> Future | None:
        """How its layers evict by the true future; None: another row."""
        return Future(self.size) if self.policy == FUTURE and self.size is not None else None

    @property
    def key(self) -> dict[str, Any]:
        """The fields that identify a result: also those of a policy, since the meaning of its name may change."""
        bounded = self._policy
        numbers = self.future.numbers if self.future else bounded and joint_numbers(*bounded)
        return {"policy": self.policy, "numbers": numbers, "size": self.size}

    @property
    def _policy(self) -> tuple[Policy, Budget | None] | None:
        """The policy and its budget; None: the row has no policy."""
        return None if self.policy in (*UNBOUNDED, FUTURE) else parse_policy(split_name(self.policy)[0])


FULL_MODEL = Cell(FULL, None)
C = TypeVar("C")


def cell_of(record: Record) -> Cell:
    return Cell(record["policy"], record["size"])


def find_cells(records: Iterable[Record], cell_of: Callable[[Record], C]) -> list[C]:
    """The distinct cells of records, without those whose policy's name has other fields now."""
    cells: dict[C, None] = {}
    for record in records:
        cell: Any = cell_of(record)
        with suppress(ValueError):
            if cell.key["numbers"] == record.get("numbers"):
                cells[cell] = None
    return list(cells)


class Grid(NamedTuple):
    """A table whose rows are policies and whose columns are sizes."""

    policies: Sequence[str]
    sizes: Sequence[int]
    length: int
    only: frozenset[Cell] | None = None  # the cells that have results; None: all

    def at(self, name: str, size: int) -> Cell:
        """The cell of a policy and a size. With as many KV rows as tokens nothing is evicted: the full model."""
        cell = Cell(name, size)
        return FULL_MODEL if name == FULL or (cell.keeps or 0) >= self.length else cell

    def has(self, name: str, size: int) -> bool:
        return self.only is None or self.at(name, size) in self.only

    def sizes_of(self, name: str) -> list[int]:
        """The sizes at which this policy has results."""
        return [size for size in self.sizes if self.has(name, size)]

    @property
    def places(self) -> list[tuple[str, int]]:
        """Policy and size of each entry that has a result, row by row."""
        return [(name, size) for name in self.policies for size in self.sizes_of(name)]

    @property
    def cells(self) -> list[Cell]:
        """Each once, the full model first."""
        cells = dict.fromkeys(self.at(name, size) for name, size in self.places)
        return sorted(cells, key=lambda cell: cell.size is not None)

    def find_comparable(self, against: str) -> list[str]:
        """The other policies that have results at a size of this one."""
        sizes = set(self.sizes_of(against))
        return [name for name in self.policies if name != against and sizes & set(self.sizes_of(name))]

    def pairs_with(self, against: str) -> list[tuple[Cell, Cell]]:
        """Each cell of another policy, and the cell of this one at the same size; each pair once."""
        places = [(name, size) for name, size in self.places if name != against and self.has(against, size)]
        pairs = dict.fromkeys((self.at(name, size), self.at(against, size)) for name, size in places)
        return [(cell, other) for cell, other in pairs if cell != other]

    def extend(self, others: Sequence[Cell]) -> Grid:
        """The table with more cells, those of earlier commands, in rows below its own."""
        policies = dict.fromkeys([*self.policies, *(cell.policy for cell in others)])
        sizes = {*self.sizes, *(cell.size for cell in others if cell.size is not None)}
        return Grid(list(policies), sorted(sizes), self.length, frozenset([*self.cells, *others]))

    def rows(self, names: Sequence[str], value: Callable[[str, int], Value]) -> list[list[Value]]:
        """A row for each of these policies: its name, and its value at each size."""
        return [[name, *(value(name, size) if self.has(name, size) else None for size in self.sizes)] for name in names]

    @property
    def header(self) -> list[str]:
        return ["policy", *(f"{size:,}" for size in self.sizes)]


def grid(policies: Sequence[str | Policy], sizes: Sequence[int], length: int) -> Grid:
    """A table of distinct policies and sizes; all spellings of a policy are one row."""
    return Grid(list(dict.fromkeys(map(row_name, policies))), sorted(set(sizes)), length)


def check_lists(policies: Sequence[str | Policy], sizes: Sequence[int]) -> None:
    """Refuse a single policy or size, empty lists, and policies and sizes that no table can have."""
    for name, given in (("policies", policies), ("sizes", sizes)):
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise UsageError("must be a list", name=name, value=given)
        if not given:
            raise UsageError("must not be empty", name=name, value=given)
    for policy in policies:
        if not isinstance(policy, str | Policy):
            raise UsageError("must be the name of a policy, or a Policy", name="policies", value=policy)
        if isinstance(policy, Policy):
            refuse_scored(policy, "evaluations store results under the fields of a policy, and a function has none")
    for size in sizes:
        if not is_whole(size):
            raise UsageError(
                "must be a whole number of KV rows",
                name="sizes",
                value=size,
                advice="name a budget with the policy, as in 'echo:upper'",
            )


def row_name(policy: str | Policy) -> str:
    """The name of a row: the one that all spellings of a policy share."""
    name, recalled = split_name(policy) if isinstance(policy, str) else (policy, None)
    if isinstance(name, str) and name.lower() in UNBOUNDED:
        if recalled:
            raise UsageError("evicts nothing that could be recalled", name="policy", value=policy)
        return name.lower()
    if isinstance(name, str) and name.lower().startswith(FUTURE):
        if recalled or name.lower() != FUTURE:
            raise UsageError(
                "the true future has no budget, no protected tokens and no recall",
                name="policy",
                value=policy,
                advice=f"write {FUTURE!r}",
            )
        return FUTURE
    return f"{joint_name(*parse_policy(name))}{recalled or ''}"


def add_recall(policies: Sequence[str | Policy], recalled: Recalled) -> list[str]:
    """The names of rows, with this recall where they evict tokens and have no recall of their own."""
    names = [row_name(policy) for policy in policies]
    without = (*UNBOUNDED, FUTURE)
    return [name if name in without or split_name(name)[1] else f"{name}{recalled}" for name in names]


def check_row(policy: str | Policy, size: int) -> None:
    """Refuse a row that no bounded or full model can compute."""
    if row_name(policy) == FUTURE:
        raise UsageError(
            "knows a text before it is read, so that it exists for perplexity alone",
            name="policy",
            value=policy,
            advice="use 'msrnn eval perplexity', or another policy",
        )
    resolve(split_name(policy)[0] if isinstance(policy, str) else policy, size)


def reference_policy(against: str | Policy | None, policies: Sequence[str]) -> str:
    """The policy that the others are compared with: TOVA, or else the first, unless one is named."""
    if against is None:
        return TOVA if TOVA in policies else policies[0]
    name = row_name(against)
    if name not in policies:
        raise UsageError(
            f"not among the policies {', '.join(policies)}", name="against", value=against, advice="add it to them"
        )
    return name
