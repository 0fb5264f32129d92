from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import PreTrainedModel

import msrnn
from msrnn.analysis.trace import TraceStore, find_traced_cells
from msrnn.errors import UsageError
from msrnn.hf.trace import ChunkTrace, trace_chunks
from msrnn.policy import NAMES, Policy
from tests.helpers.networks import write_random_weights
from tests.helpers.tiny import FAMILIES, build, llama, tokens

IDS = tokens(3, 30).numpy()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama())


@pytest.mark.parametrize("policy", ["tova", "h2o"])
def test_what_is_kept_is_what_was_traced(model: PreTrainedModel, policy: str, tmp_path: Path) -> None:
    read: list[int] = []
    store = TraceStore(tmp_path / "new", model, policy, 6)
    assert store.missing(IDS) == [0, 1, 2]
    store.fill(IDS.astype(numpy.uint16), batch=2, on_tokens=read.append)
    assert (sum(read), store.missing(IDS)) == (90, [])
    expected = msrnn.trace(msrnn.MultiStateRNN(model, policy, 6), torch.tensor(IDS)).evicted_at
    for ids, times in zip(IDS, expected, strict=True):
        found = store.load(ids)
        assert (found.evicted_at == times.numpy()).all()
        assert (found.layers, found.sizes) == ((0, 1), (6, 6))
    assert len(list((tmp_path / "new").iterdir())) == 3
    store.fill(IDS, on_tokens=read.append)
    assert sum(read) == 90


def test_sliding_layers_have_sizes_of_their_own() -> None:
    rnn = msrnn.MultiStateRNN(build(FAMILIES["gemma2"]()), "tova", 20)
    assert trace_chunks(rnn, IDS)[0].sizes == (11, 20)


def test_what_makes_another_trace(model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(model: PreTrainedModel, policy: str | Policy = "tova", size: int = 6, ids: Any = IDS) -> int:
        return len(TraceStore(tmp_path, model, policy, size).missing(ids))

    TraceStore(tmp_path, model, "tova", 6, {"machine": "this one"}).fill(IDS)
    assert missing(model) == 0
    assert missing(model, size=7) == missing(model, "tova+1") == missing(model, ids=IDS[:, :-1]) == 3
    assert missing(build(llama(), seed=1)) == missing(build(llama()).bfloat16()) == 3
    assert missing(build(llama())) == 0
    monkeypatch.setitem(NAMES, "tova", Policy(decay=0.5))
    assert missing(model) == 3


def test_a_run_that_was_stopped_goes_on(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, original, calls = TraceStore(tmp_path, model, "tova", 6), TraceStore._trace_batch, list[int]()

    def trace_batch(self: TraceStore, chunks: numpy.ndarray, on_tokens: Any) -> list[ChunkTrace]:
        calls.append(len(chunks))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(self, chunks, on_tokens)

    monkeypatch.setattr(TraceStore, "_trace_batch", trace_batch)
    with pytest.raises(KeyboardInterrupt):
        store.fill(IDS, batch=2)
    assert store.missing(IDS) == [2]
    store.fill(IDS, batch=2)
    assert calls == [2, 1, 1]
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


def test_files_that_are_no_traces_of_this(model: PreTrainedModel, tmp_path: Path) -> None:
    store = TraceStore(tmp_path, model, "tova", 6)
    store.fill(IDS)
    path, other = store.path(IDS[0]), TraceStore(tmp_path, model, "tova", 7)
    path.rename(other.path(IDS[0]))
    with pytest.raises(ValueError, match="another model, policy, size or dtype"):
        other.load(IDS[0])
    whole = store.path(IDS[1]).read_bytes()
    for bad in (whole[:-40], whole[:30], b"", b"not a trace"):
        store.path(IDS[1]).write_bytes(bad)
        with pytest.raises(ValueError, match="truncated, or not a trace; delete it"):
            store.load(IDS[1])
    numpy.savez_compressed(store.path(IDS[1]), after=numpy.zeros((1, 1, 4)), about=numpy.array("[" * 100_000))
    with pytest.raises(ValueError, match="truncated, or not a trace; delete it"):
        store.load(IDS[1])


def test_a_batch_that_does_not_fit(model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trace(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("msrnn.hf.trace.trace", trace)
    with pytest.raises(ValueError, match="batch=3: tova 6 does not fit"):
        TraceStore(tmp_path, model, "tova", 6).fill(IDS, batch=8)


def test_traces_under_a_file_of_row_weights(model: PreTrainedModel, tmp_path: Path) -> None:
    """Its folder is a part of the policy's name, and its content identifies the traces."""
    file = write_random_weights(tmp_path / "weights.safetensors", model)
    store = TraceStore(tmp_path / "traces", model, f"echo@{file}", 8)
    store.fill(IDS)
    assert TraceStore(tmp_path / "traces", model, f"echo@{file}", 8).missing(IDS) == []
    assert find_traced_cells(tmp_path / "traces") == [(f"echo@{file}", 8)]
    write_random_weights(file, model, seed=5)
    assert TraceStore(tmp_path / "traces", model, f"echo@{file}", 8).missing(IDS) == [0, 1, 2]


def test_odd_and_long_names_of_such_a_file(model: PreTrainedModel, tmp_path: Path) -> None:
    file = write_random_weights(tmp_path / "a%2Fb-4.safetensors", model)
    TraceStore(tmp_path / "traces", model, f"echo@{file}", 8).fill(IDS)
    assert find_traced_cells(tmp_path / "traces") == [(f"echo@{file}", 8)]
    long = write_random_weights(tmp_path / f"{'a' * 200}.safetensors", model)
    with pytest.raises(UsageError, match="too long for the name of a trace file; use a shorter path"):
        TraceStore(tmp_path / "traces", model, f"echo@{long}", 8)
