"""numba loops on a CPU: the two scans, and a whole decode step in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from msrnn.backends.numba.decode import decode_numba
from msrnn.backends.numba.scan import scan_numba, scan_repositioned_numba
from msrnn.backends.torch import TorchBackend
from msrnn.core.scores import Scoring
from msrnn.core.slots import Slots


class NumbaBackend(TorchBackend):
    name = "numba"
    scan = staticmethod(scan_numba)
    scan_repositioned = staticmethod(scan_repositioned_numba)

    def decode(
        self,
        slots: Slots,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_position: Tensor,
        scoring: Scoring,
        share: Tensor | None = None,
    ) -> Tensor:
        if slots.keys.dtype == torch.float32 and scoring.repositioning is None:
            return decode_numba(slots, query, key, value, query_position, scoring, share)
        return super().decode(slots, query, key, value, query_position, scoring, share)
