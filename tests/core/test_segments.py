"""Segments: what a layout allocates, and how many bytes it says that it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from msrnn.core.quantization import quantize
from msrnn.core.segments import ArchiveLayout


def layout(**changes: Any) -> ArchiveLayout:
    cpu = torch.device("cpu")
    return ArchiveLayout(2, 6, 3, changes.pop("dtype", torch.bfloat16), changes.pop("code", None), cpu, **changes)


def test_rows_for_kernels_are_side_by_side() -> None:
    (segment,) = layout(whole=True, index_on=torch.device("cpu")).segments([16])
    assert segment.keys.stride() == segment.values.stride() == (16 * 9, 9, 1)
    assert segment.values.data_ptr() == segment.keys.data_ptr() + 6 * 2
    assert segment.index is not None
    copies = [tensor for tensor in segment.index if tensor is not None]
    assert segment.addresses() == [tensor.data_ptr() for tensor in (segment.keys, *copies)]


def test_other_rows_are_apart() -> None:
    (segment,) = layout().segments([16])
    assert segment.keys.is_contiguous()
    assert segment.values.is_contiguous()


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_written_is_read(whole: bool) -> None:
    (segment,) = layout(whole=whole, index_on=torch.device("cpu")).segments([16])
    key, value = torch.randn(2, 5, 6).bfloat16(), torch.randn(2, 5, 3).bfloat16()
    segment.write(3, quantize(key, None), quantize(value, None))
    found = segment.read(3, 8)
    assert torch.equal(found[0].codes, key)
    assert torch.equal(found[1].codes, value)
    assert segment.index is not None
    assert torch.equal(segment.index.codes[:, 3:8], quantize(key.float(), torch.int8).codes)


@pytest.mark.parametrize("code", [None, torch.int8])
def test_bytes_are_those_of_the_tensors(code: torch.dtype | None) -> None:
    made = layout(code=code, index_on=torch.device("cpu"))
    (segment,) = made.segments([10])
    rows = [segment.keys, segment.values, segment.key_scale, segment.value_scale]
    assert 10 * made.row_bytes == sum(tensor.nbytes for tensor in rows if tensor is not None)
    assert segment.index is not None
    assert 10 * made.index_row_bytes == sum(tensor.nbytes for tensor in segment.index if tensor is not None)
    assert layout(code=code).index_row_bytes == 0
