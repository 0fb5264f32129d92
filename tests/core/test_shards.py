from __future__ import annotations

import pytest
import torch
from torch import Tensor

from msrnn.core.shards import check_same, least, own_part
from msrnn.errors import UsageError
from tests.helpers.shards import Others


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
