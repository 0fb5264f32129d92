"""What layers may hold, for kernels to be tried on: every policy, odd sizes, a window, a horizon."""

from __future__ import annotations

from msrnn.policy import Bound, Policy, policy

BOUNDS = [
    Bound(policy("tova"), 6),
    Bound(policy("tova-head"), 33),
    Bound(policy("window"), 1),
    Bound(policy("window+4"), 7),
    Bound(policy("h2o"), 8),
    Bound(Policy(0.5, "layer", 2, 0.25), 9),
    Bound(Policy(0.9, "head", 1, 2), 6, window=9),
    Bound(policy("echo+2~12"), 9, window=12, spared=2),
    Bound(Policy(0.9, "layer", 0, 0.5, value=True), 9),
    Bound(Policy(0.0, "head", 1, value=True), 6),
]
