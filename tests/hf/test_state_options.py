"""Options that depend on each other or on the model are refused with their names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from msrnn.bound import layer_bound
from msrnn.errors import UsageError
from msrnn.hf.state_options import check_chunk, check_partly_bounded, check_unbounded, fitting_gap, layer_backend
from msrnn.size import resolve

CPU = torch.device("cpu")


def test_the_full_policy_has_no_rows_to_quantize_and_no_gaps() -> None:
    check_unbounded(None, "original")
    with pytest.raises(UsageError, match=r"^state_dtype='int8': policy 'full' does not quantize"):
        check_unbounded("int8", "original")
    with pytest.raises(UsageError, match=r"^positions='compact': policy 'full' leaves no gaps"):
        check_unbounded(None, "compact")


@pytest.mark.parametrize(
    ("quantized", "positions", "name"), [(torch.int8, "original", "state_dtype"), (None, "compact", "positions")]
)
def test_options_that_need_a_size_for_every_layer(quantized: Any, positions: str, name: str) -> None:
    _, size = resolve("tova", [8, None])
    assert size is not None
    check_partly_bounded(size, None, "original")
    with pytest.raises(UsageError, match=rf"^{name}: needs a size for every layer"):
        check_partly_bounded(size, quantized, positions)


def test_chunks_of_one_token_or_more() -> None:
    check_chunk(None)
    check_chunk(1)
    with pytest.raises(UsageError, match="chunk=0"):
        check_chunk(0)


def test_the_largest_gap_that_fits_the_training_length() -> None:
    config = SimpleNamespace(max_position_embeddings=101)
    assert [fitting_gap(config, sizes) for sizes in ([10, 7], [33, None], [100])] == [10, 3, 1]
    with pytest.raises(UsageError, match="size=101 does not fit the 101 positions"):
        fitting_gap(config, [8, 101])
    for known, sizes in ((SimpleNamespace(), [8]), (config, [None])):
        with pytest.raises(UsageError, match="no max_position_embeddings"):
            fitting_gap(known, sizes)


def test_the_backend_of_a_layer() -> None:
    policy, _ = resolve("tova", 8)
    bound = layer_bound(policy, 8, None)
    assert [layer_backend(name, policy, bound, CPU).name for name in ("torch", "numba")] == ["torch", "numba"]
    with pytest.raises(UsageError, match="none"):
        layer_backend("none", policy, bound, CPU)
