from __future__ import annotations

import torch

from msrnn.training.decisions import Decisions
from msrnn.training.networks import make_networks
from msrnn.training.summary import Lost, describe, make_table, measure_lost


def test_the_shares_by_hand() -> None:
    change = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    importance = torch.tensor([1.0, 2.0, 0.0, 3.0]).view(1, 1, 1, 4)
    decisions = Decisions(torch.randn(1, 1, 1, 4, 2).half(), importance, torch.zeros(1, 1, 1, 4), change)
    lost = measure_lost([make_networks(decisions, 2, 0)], [decisions])
    assert [round(share, 6) for share in lost] == [0.3, 0.3, 0.1]
    assert lost.closed == 0
    assert abs(Lost(0.3, 0.2, 0.1).closed - 0.5) < 1e-6
    assert Lost(0.1, 0.1, 0.1).closed == 0


def test_the_table_and_the_values() -> None:
    results = {"novels": {128: Lost(0.3, 0.2, 0.1)}}
    assert make_table(results, "echo").strings() == [["novels, 128", "0.3000", "0.2000", "0.1000", "50%"]]
    assert describe(results) == {"novels": {"128": {"policy": 0.3, "weights": 0.2, "future": 0.1}}}
