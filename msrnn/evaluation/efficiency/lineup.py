"""Who takes part in an efficiency table, in which order."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import product

from msrnn.core.rope import ORIGINAL
from msrnn.errors import UsageError
from msrnn.evaluation.efficiency import NATIVE
from msrnn.evaluation.efficiency.contenders import Bounded, Contender, Factory, Setup
from msrnn.evaluation.efficiency.full import DynamicFull, StaticFull


@dataclass(frozen=True)
class Lineup:
    """The full model, a policy at every size, dtype of the states and positions, and others at every size."""

    policy: str
    sizes: Sequence[int]
    state_dtypes: Sequence[str] = (NATIVE,)
    compile: bool = False
    positions: Sequence[str] = (ORIGINAL,)
    others: Sequence[Factory] = ()

    def contenders(self, setup: Setup, say: Callable[[str], None]) -> Iterator[Contender]:
        """One at a time, so that each has the memory to itself; the full model first."""
        if StaticFull.possible(setup.model):
            yield StaticFull(setup)
        else:
            say("this model has sliding or linear layers: the full model is measured with its dynamic cache alone")
        yield DynamicFull(setup)
        for positions, dtype, size in product(self.positions, self.state_dtypes, self.sizes):
            code = None if dtype == NATIVE else dtype
            yield Bounded(setup.model, self.policy, size, code, self.compile, positions)
        for factory in self.others:
            for size in self.sizes:
                yield factory(setup, size)


def imported(name: str) -> Factory:
    """MODULE:ATTRIBUTE, the module also from the working folder."""
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise UsageError(f"contender {name!r}: must be MODULE:ATTRIBUTE, as in benchmarks.published:published")
    sys.path.insert(0, here := os.getcwd())
    try:
        factory = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"contender {name!r} cannot be imported: {error}") from error
    finally:
        sys.path.remove(here)
    if not callable(factory):
        raise UsageError(f"contender {name!r}: {type(factory).__name__} cannot be called with a setup and a size")
    return factory  # type: ignore[no-any-return]
