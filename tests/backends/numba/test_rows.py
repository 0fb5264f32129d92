from __future__ import annotations

import math

import torch

from msrnn.backends.numba.rows import LIFT, lift_exp


def test_the_exponential_is_exact_to_rounding() -> None:
    x = -torch.logspace(-6, 2.2, 4000)
    mine = torch.tensor([float(lift_exp(v)) for v in x.numpy()])
    torch.testing.assert_close(mine.double(), x.double().exp() * 2.0**LIFT, rtol=3e-7, atol=0)
    for v, expected in ((3.0, 1.0), (0.0, 1.0), (torch.inf, 1.0)):
        assert lift_exp(torch.tensor(v).numpy()[()]) == expected * 2.0**LIFT
    assert math.isnan(lift_exp(torch.tensor(torch.nan).numpy()[()]))
    assert 0 < lift_exp(torch.tensor(-torch.inf).numpy()[()]) < 2.0**-125
