"""How columns that are in flight together are read: a plan of forward passes as values, without a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from msrnn.hf.wavefront import Wave

SHORTEST_REST = 16  # columns: shorter texts are padded to this many


class Shape(NamedTuple):
    """The columns of a captured read."""

    width: int = 1
    block: int = 1  # of them pass through the model at once


STEP = Shape()


class ReadStep(NamedTuple):
    """Some columns that are read and counted together."""

    width: int  # new columns
    shape: Shape  # what the model reads: these columns, with padding on their left if it is wider
    replays: bool  # a captured graph of this shape, or else kernels that are launched one by one

    @property
    def padding(self) -> int:
        return self.shape.width - self.width


def plan_read(width: int, wave: Wave, stepwise: bool, has_graph: Callable[[Shape], bool]) -> list[ReadStep]:
    """The steps that read `width` columns, as `Wave.widths` returns them.

    `has_graph` says whether the next read of a shape has a captured graph. Without one, kernels are launched one by
    one, in fewer and larger blocks. `stepwise`: blocks are read token by token. Launching then takes much longer than
    replaying, so without a graph of all blocks each block is read alone, and padding would cost as much as tokens.
    """
    if width % wave.block:
        return [ReadStep(width, Shape(width, width), False) if stepwise else _plan_rest(width, wave, has_graph)]
    shape = Shape(width, wave.block if stepwise else wave.block_of(width))
    if width > 1 and has_graph(shape):
        return [ReadStep(width, shape, replays=True)]
    if stepwise and width > wave.block:
        blocks = width // wave.block
        return [step for _ in range(blocks) for step in plan_read(wave.block, wave, stepwise, has_graph)]
    return [ReadStep(width, Shape(width, _choose_block(width, wave)), replays=False)]


def _plan_rest(width: int, wave: Wave, has_graph: Callable[[Shape], bool]) -> ReadStep:
    """The rest of a text, or a short one, padded to a power of two: few graphs fit all lengths."""
    padded = min(wave.alone, max(SHORTEST_REST, 1 << (width - 1).bit_length()))
    shape = Shape(padded, padded)
    return ReadStep(width, shape, has_graph(shape))


def _choose_block(width: int, wave: Wave) -> int:
    """The largest block that divides the columns, where no graph limits it."""
    block = wave.block
    while width % (2 * block) == 0 and 2 * block <= wave.alone:
        block *= 2
    return block
