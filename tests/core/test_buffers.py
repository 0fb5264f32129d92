from __future__ import annotations

import torch

from msrnn.core.buffers import Buffers, LayerShape

SHAPE = LayerShape(4, 2, 8, 6, torch.float32, torch.device("cpu"))


def test_positions_count_tokens_and_not_padding() -> None:
    buffers = Buffers(2, SHAPE, rows=5, groups=1)
    real = torch.tensor([[True, True, True], [False, True, True]])
    assert buffers.advance(3, real).tolist() == [[0, 1, 2], [-1, 0, 1]]
    assert buffers.advance(2, None).tolist() == [[3, 4], [2, 3]]
    assert buffers.seen.tolist() == [5, 4]


def test_views_share_memory_and_copies_do_not() -> None:
    buffers = Buffers(3, SHAPE, rows=5, groups=2)
    view, copy, other = buffers.view(slice(1, 2)), buffers.copy(slice(1, 2)), buffers.select(torch.tensor([1, 1]))
    buffers.position[1, 0, 0] = 7
    assert (view.position[0, 0, 0], copy.position[0, 0, 0], other.position[1, 0, 0]) == (7, -1, -1)
    assert (view.batch_size, copy.batch_size, other.batch_size) == (1, 1, 2)
    assert buffers.nbytes == 3 * (2 * 5 * (8 + 6) * 4 + 2 * 5 * 4 + 8)
    buffers.reset()
    assert bool((buffers.position == -1).all())


def test_tensors_outlive_inference_mode() -> None:
    with torch.inference_mode():
        buffers = Buffers(1, SHAPE, rows=5, groups=1)
        joined = buffers.cat([buffers, buffers], columns=0)
    for layer in (buffers, joined):
        assert not any(tensor.is_inference() for tensor in layer.tensors().values())
        layer.seen += 1
