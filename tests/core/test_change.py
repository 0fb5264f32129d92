from __future__ import annotations

import torch

from msrnn.core.change import LEAST_REST, output_changes, sum_changes


def test_it_is_what_a_missing_row_changes() -> None:
    torch.manual_seed(0)
    scores, value = torch.randn(1, 2, 5, 7).double(), torch.randn(1, 2, 7, 3).double()
    attention = scores.softmax(-1)
    output = attention @ value
    expected = torch.zeros(1, 2, 5, 7).double()
    for j in range(7):
        rest = [i for i in range(7) if i != j]
        without = scores[..., rest].softmax(-1) @ value[:, :, rest]
        expected[..., j] = (without - output).square().sum(-1)
    torch.testing.assert_close(output_changes(attention, output, value), expected)
    torch.testing.assert_close(sum_changes(attention, output, value), expected.sum(-2))


def test_the_only_row_that_is_attended_to_costs_no_infinity() -> None:
    changes = sum_changes(torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 1, 2))
    torch.testing.assert_close(changes, torch.full((1, 1, 1), 2 / LEAST_REST**2))
