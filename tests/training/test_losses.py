from __future__ import annotations

import torch

from msrnn.training import losses
from msrnn.training.losses import compute_loss, counts_of, sum_lost, sum_softly_lost


def test_what_the_lowest_rows_have() -> None:
    score, change = torch.tensor([3.0, 1.0, 2.0, 0.0]), torch.tensor([5.0, 7.0, 11.0, 13.0])
    assert [sum_lost(score, change, n).item() for n in (1, 2, 3)] == [13, 20, 31]


def test_a_sharp_threshold_is_the_exact_one() -> None:
    torch.manual_seed(0)
    score, change = torch.randperm(40).float() * 100, torch.rand(40)
    for evicted in counts_of(40):
        torch.testing.assert_close(sum_softly_lost(score, change, evicted), sum_lost(score, change, evicted))


def test_raising_all_scores_changes_nothing() -> None:
    torch.manual_seed(0)
    score, change = torch.randn(6, 40, requires_grad=True), torch.rand(6, 40)
    lost = sum_softly_lost(score, change, 10)
    (gradient,) = torch.autograd.grad(lost.sum(), score)
    torch.testing.assert_close(gradient.sum(-1), torch.zeros(6), atol=1e-4, rtol=0)
    torch.testing.assert_close(sum_softly_lost(score + 5, change, 10), lost)
    assert gradient.abs().max() > 0.01


def test_a_step_along_the_gradient_loses_less() -> None:
    torch.manual_seed(0)
    score, change = torch.randn(6, 2, 1, 40, requires_grad=True), torch.rand(6, 2, 1, 40)
    reference = [sum_lost(score.detach(), change, n).mean((0, 2)) for n in counts_of(40)]
    for _ in range(20):
        loss = compute_loss(score, change, reference)
        (gradient,) = torch.autograd.grad(loss, score)
        score = (score - 20 * gradient).detach().requires_grad_()
    assert compute_loss(score, change, reference) < 0.9


def test_some_are_evicted_and_some_stay() -> None:
    assert counts_of(2) == [1, 1, 1]
    assert counts_of(77) == [10, 19, 38]
    assert len(losses.SHARES) == 3
