"""SideStreams: what is launched beside other work starts after what was before, and ends before what comes next."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.nn.functional import normalize

from msrnn.backends.triton.streams import SideStreams


def test_a_cpu_does_all_in_order() -> None:
    streams, done = SideStreams(torch.device("cpu")), list[int]()
    for number in range(3):
        with streams.beside():
            done.append(number)
    streams.join()
    assert done == [0, 1, 2]


@pytest.mark.gpu
def test_lanes_are_joined_in_a_captured_graph() -> None:
    device = torch.device("cuda")
    work = torch.randn(2048, 2048, device=device)
    parts = [torch.zeros(2048, 2048, device=device) for _ in range(3)]
    total = torch.zeros(2048, 2048, device=device)

    def compute() -> None:
        streams = SideStreams(device)
        for number, part in enumerate(parts):
            part.copy_(work).mul_(number + 1)
            with streams.beside():
                for _ in range(8):
                    part.copy_(normalize(part @ part))  # or it would soon be infinite
        streams.join()
        total.zero_()
        for part in parts:
            total.add_(part)

    compute()
    expected = total.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    for _ in range(3):
        total.fill_(-1.0)
        graph.replay()
        torch.testing.assert_close(total, expected)


@pytest.mark.gpu
def test_each_thread_has_lanes_of_its_own() -> None:
    found: list[int] = []

    def use() -> None:
        streams = SideStreams(torch.device("cuda"))
        with streams.beside():
            found.append(torch.cuda.current_stream().cuda_stream)
        streams.join()

    use()
    other = threading.Thread(target=use)
    other.start()
    other.join()
    assert len(set(found)) == 2
