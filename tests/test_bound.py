"""Bounds of layers: sliding windows and horizons. `test_size.py` has sizes that a policy cannot have."""

from __future__ import annotations

from msrnn.bound import Bound, layer_bound
from msrnn.policy import FULL, Policy


def test_sliding_layers_forget_what_they_cannot_see() -> None:
    tova = Policy.parse("tova")
    assert layer_bound(tova, 512, None) == Bound(tova, 512)
    assert layer_bound(tova, 512, 128) == Bound(Policy.parse("window"), 127, sliding=True)
    assert layer_bound(tova, 512, 513) == Bound(Policy.parse("window"), 512, sliding=True)
    assert layer_bound(tova, 512, 514) == Bound(tova, 512, window=514, sliding=True)
    assert layer_bound(FULL, None, 128) == Bound(Policy.parse("window"), 127, sliding=True)
    assert layer_bound(FULL, None, None) is None


def test_a_horizon_hides_all_but_the_first_tokens() -> None:
    far = Policy.parse("tova+2~600")
    assert layer_bound(far, 512, None) == Bound(far, 512, window=600)
    assert layer_bound(far, 512, 1024) == Bound(far, 512, window=600, sliding=True)
    assert (Bound(far, 512, window=600).spared, Bound(far, 512, window=600, sliding=True).spared) == (2, 0)
    assert layer_bound(far, 512, 550) == Bound(far, 512, window=550, sliding=True)
    assert layer_bound(far, 512, 128) == Bound(Policy.parse("window"), 127, sliding=True)
