"""Tables of learned positions (GPT-2): what a cache does so that no model looks past the end of its table."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from msrnn.errors import UsageError
from msrnn.hf.state_spec import StateSpec


class NoPositionError(UsageError, AttributeError):
    """A step of `generate` past the learned positions.

    Masks ask `getattr(cache, "is_compileable", False)`, and take an AttributeError for False. They must not refuse: a
    caller of `model.forward` may pass position ids that the table has.
    """


class CheckedLength(int):
    """The columns that a cache has read. Models add it to `torch.arange(T)` to compute the position ids of T tokens.

    torch asks its operands to compute that sum (`__torch_function__`), and this one refuses positions past the table.
    """

    spec: StateSpec

    def __new__(cls, columns: int, spec: StateSpec) -> CheckedLength:
        length = super().__new__(cls, columns)
        length.spec = spec
        return length

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*(int(arg) if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))
        if function is Tensor.add:
            next(arg for arg in args if isinstance(arg, cls)).check(result)
        return result

    def check(self, position_ids: Tensor) -> None:
        """Refuse position ids past the table. Values are read, which waits for a GPU, only if some may be past it."""
        if is_past_table(self.spec, self + position_ids.numel() - 1):
            self.spec.check_position(int(position_ids.max()))


def is_past_table(spec: StateSpec, column: int) -> bool:
    """Whether a token in this column may have a position past the table; with padding, its position is smaller."""
    last = spec.model.last_position
    return last is not None and column > last
