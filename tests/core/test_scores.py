from __future__ import annotations

import pytest
import torch

from msrnn.core.scores import Scoring


def test_scores_are_scaled_and_capped_in_float32() -> None:
    query, keys = torch.tensor([[[[2.0, 0.0]]]]).bfloat16(), torch.tensor([[[[3.0, 1.0], [-300.0, 1.0]]]]).bfloat16()
    plain = Scoring(0.5)(query, keys)
    assert plain.dtype == torch.float32
    assert plain.tolist() == [[[[3.0, -300.0]]]]
    torch.testing.assert_close(Scoring(0.5, softcap=50.0)(query, keys), 50 * (plain / 50).tanh())


def test_learned_sinks_are_shared_out_among_groups() -> None:
    sinks = torch.arange(4.0, requires_grad=True)
    found = Scoring(1.0, sinks=sinks).sinks_of(3, 2, 5)
    assert found is not None
    assert not found.requires_grad
    assert (found.shape, found.stride(0), found.stride(3)) == ((3, 2, 2, 5), 0, 0)
    assert (found == torch.tensor([[0.0, 1.0], [2.0, 3.0]])[:, :, None]).all()
    assert Scoring(1.0).sinks_of(3, 2, 5) is None


def test_sinks_of_each_query_are_shared_out_among_groups() -> None:
    sinks = torch.randn(3, 4, 5)
    found = Scoring(1.0, sinks=sinks).sinks_of(3, 2, 5)
    assert found is not None
    assert torch.equal(found[:, 1, 0], sinks[:, 2])
    for batch, columns in ((2, 5), (3, 4), (3, 1)):
        with pytest.raises(RuntimeError, match="expand"):
            Scoring(1.0, sinks=sinks).sinks_of(batch, 2, columns)
