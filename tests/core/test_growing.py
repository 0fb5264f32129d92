from __future__ import annotations

import torch

from msrnn.core.buffers import LayerShape
from msrnn.core.growing import Growing

SHAPE = LayerShape(4, 2, 8, 6, torch.float32, torch.device("cpu"))


def append(layer: Growing, columns: int) -> None:
    start, position = int(layer.seen[0]), layer.advance(columns, None)
    rows = position[:, None, :, None].float()
    layer.append(start, rows.expand(-1, 2, -1, 8), rows.expand(-1, 2, -1, 6), position)


def test_rows_double_and_stay() -> None:
    layer = Growing(2, SHAPE)
    for columns, rows in ((60, 64), (10, 128), (300, 370)):
        append(layer, columns)
        assert layer.keys.shape[2] == layer.values.shape[2] == layer.position.shape[2] == rows
    assert layer.position[1, 0].tolist() == list(range(370))
    assert layer.keys[1, 1, :, 3].tolist() == layer.values[0, 0, :, 5].tolist() == list(range(370))


def test_layers_of_other_lengths_are_joined() -> None:
    long, short = Growing(1, SHAPE), Growing(1, SHAPE)
    append(long, 100)
    append(short, 3)
    both = long.cat([long, short], 100)
    assert both.padded
    assert both.position[1, 0].tolist() == [0, 1, 2] + [-1] * 125
    assert not long.cat([long, long], 100).padded
