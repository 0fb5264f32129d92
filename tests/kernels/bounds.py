"""What layers may hold, for kernels to be tried on: every policy, odd sizes, a window, a horizon."""

from __future__ import annotations

from msrnn.policy import Bound, Policy, policy

BOUNDS = {
    "tova": Bound(policy("tova"), 6),
    "tova-head": Bound(policy("tova-head"), 33),
    "window": Bound(policy("window"), 1),
    "window+4": Bound(policy("window+4"), 7),
    "h2o": Bound(policy("h2o"), 8),
    "decay": Bound(Policy(0.5, "layer", 2, 0.25), 9),
    "decay-sliding": Bound(Policy(0.9, "head", 1, 2), 6, window=9),
    "echo+2~12": Bound(policy("echo+2~12"), 9, window=12, spared=2),
    "decay-value": Bound(Policy(0.9, "layer", 0, 0.5, value=True), 9),
    "value-head": Bound(Policy(0.0, "head", 1, value=True), 6),
}
