"""Which processes may share a model; `test_tensor_parallel.py` has what they compute."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from msrnn.core.shards import check_same, least, own_part
from msrnn.errors import UsageError
from msrnn.hf.tensor_parallel import check_heads_divide, is_split, shards_of
from tests.helpers.tiny import build, llama


@dataclass
class Others:
    """The first of some processes; the others have these tensors."""

    tensors: list[Tensor]
    rank: int = 0
    capturable: bool = False

    @property
    def count(self) -> int:
        return 1 + len(self.tensors)

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor.add_(sum(self.tensors))

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat([tensor, *self.tensors], dim)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "count", "refused"),
    [
        (6, 2, 2, None),
        (6, 3, 3, None),
        (6, 3, 2, "3 KV heads, which 2 processes"),
        (6, 2, 4, "6 query heads, which 4 processes"),
    ],
)
def test_processes_must_divide_the_heads(heads: int, kv_heads: int, count: int, refused: str | None) -> None:
    model = build(llama(heads, kv_heads))
    shards = Others([torch.zeros(1)] * (count - 1))
    if refused is None:
        check_heads_divide(model, model.config, shards)
    else:
        with pytest.raises(UsageError, match=refused):
            check_heads_divide(model, model.config, shards)


def test_a_model_of_one_process() -> None:
    model = build(llama())
    assert shards_of(model) is None
    assert not is_split(model)


def test_what_differs_is_refused() -> None:
    mine = torch.arange(6)
    with pytest.raises(UsageError, match=r"other tokens \(ranks 2 differ from rank 0\)"):
        check_same(mine, Others([_digest(mine), _digest(mine + 1)]), "other tokens")
    check_same(mine, Others([_digest(mine)] * 2), "other tokens")
    # The same bytes are another tensor in another shape.
    with pytest.raises(UsageError, match="ranks 1 differ"):
        check_same(mine, Others([_digest(mine.view(2, 3))]), "other tokens")


def _digest(tensor: Tensor) -> Tensor:
    """What `check_same` sends for a tensor."""
    seen: list[Tensor] = []

    class Listening(Others):
        def gather(self, tensor: Tensor, dim: int) -> Tensor:
            seen.append(tensor)
            return tensor

    check_same(tensor, Listening([]), "")
    return seen[0]


def test_the_least_and_the_own_part() -> None:
    cpu = torch.device("cpu")
    assert least(5, None, cpu) == 5
    assert least(5, Others([torch.tensor([3]), torch.tensor([9])]), cpu) == 3
    assert own_part(torch.arange(6), 0, Others([torch.zeros(1)], rank=1)).tolist() == [3, 4, 5]
    assert own_part(torch.arange(6), 0, None).tolist() == [*range(6)]
