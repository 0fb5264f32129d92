"""Blocks of pinned memory: apart from each other, used again, and only when nothing uses them any more.

Memory that is not pinned stands for slabs, but for the test on a GPU: which block is whose is the same.
"""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from msrnn.core import pinned_memory
from msrnn.core.pinned_memory import PAGE, PINNED, PinnedMemory

GPU = torch.device("cuda:1")


class Slabs:
    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.waits = 0
        self.fails = False
        self.meanwhile: Callable[[], object] = lambda: None

    def pin(self, nbytes: int, device: torch.device) -> mmap.mmap:
        assert device == GPU
        if self.fails and len(self.sizes) > 0:
            raise RuntimeError("cannot be pinned")
        self.sizes.append(nbytes)
        return mmap.mmap(-1, nbytes)

    def wait(self, device: torch.device) -> None:
        assert device == GPU
        self.waits += 1
        self.meanwhile()


@pytest.fixture
def slabs(monkeypatch: pytest.MonkeyPatch) -> Slabs:
    monkeypatch.setattr(pinned_memory, "FIRST_SLAB", 4 * PAGE)
    monkeypatch.setattr(pinned_memory, "LARGEST_SLAB", 16 * PAGE)
    return Slabs()


def test_blocks_are_apart(slabs: Slabs) -> None:
    memory = PinnedMemory(slabs.pin, slabs.wait)
    sizes = [1, PAGE, PAGE + 1, 3 * PAGE, 40 * PAGE, 7]
    blocks = [memory.take(size, GPU) for size in sizes]
    for number, block in enumerate(blocks):
        block.fill_(number)
    for number, (block, size) in enumerate(zip(blocks, sizes, strict=True)):
        assert block.numel() >= size
        assert bool((block == number).all())


def test_a_block_returns_when_no_tensor_uses_it(slabs: Slabs) -> None:
    memory = PinnedMemory(slabs.pin, slabs.wait)
    first = memory.take(PAGE, GPU)
    view, address = first[10:20].view(torch.int8), first.data_ptr()
    del first
    gc.collect()
    assert memory.take(PAGE, GPU).data_ptr() != address
    del view
    gc.collect()
    waits = slabs.waits
    taken = [memory.take(PAGE, GPU) for _ in range(3)]
    assert address in {block.data_ptr() for block in taken}
    assert slabs.waits > waits  # kernels may have used it


def test_slabs_grow_and_one_is_pinned_ahead(slabs: Slabs) -> None:
    memory = PinnedMemory(slabs.pin, slabs.wait)
    blocks = [memory.take(PAGE, GPU) for _ in range(4 + 8 + 16 + 1)]
    assert len({block.data_ptr() for block in blocks}) == len(blocks)
    assert slabs.sizes[:4] == [4 * PAGE, 8 * PAGE, 16 * PAGE, 16 * PAGE]


def test_where_no_slab_can_be_pinned_ahead_the_error_comes_when_there_is_no_room(slabs: Slabs) -> None:
    memory = PinnedMemory(slabs.pin, slabs.wait)
    slabs.fails = True
    blocks = [memory.take(PAGE, GPU) for _ in range(4)]
    with pytest.raises(RuntimeError, match="cannot be pinned"):
        memory.take(PAGE, GPU)
    slabs.fails = False
    blocks.append(memory.take(PAGE, GPU))
    assert len({block.data_ptr() for block in blocks}) == 5


def test_threads_get_blocks_of_their_own(slabs: Slabs) -> None:
    memory = PinnedMemory(slabs.pin, slabs.wait)
    with ThreadPoolExecutor(8) as pool:
        blocks = [*pool.map(memory.take, [PAGE] * 200, [GPU] * 200)]
    assert len({block.data_ptr() for block in blocks}) == 200


def test_a_block_that_returns_during_a_wait_is_not_used_before_the_next(slabs: Slabs) -> None:
    memory = PinnedMemory(slabs.pin, slabs.wait)
    blocks = [memory.take(PAGE, GPU) for _ in range(2)]
    late = blocks[1].data_ptr()
    del blocks[0]
    slabs.meanwhile = blocks.clear
    first = memory.take(PAGE, GPU)
    assert slabs.waits == 1
    second = memory.take(PAGE, GPU)
    assert slabs.waits == 2
    assert late in (first.data_ptr(), second.data_ptr())
    assert first.data_ptr() != late


@pytest.mark.gpu
def test_a_gpu_copies_from_and_to_it() -> None:
    block = PINNED.take(1000, torch.device("cuda"))
    assert block.is_pinned()
    block.copy_(torch.arange(block.numel(), device="cuda") % 251)
    torch.cuda.synchronize()
    assert torch.equal(block.cuda().cpu(), (torch.arange(block.numel()) % 251).to(torch.uint8))
