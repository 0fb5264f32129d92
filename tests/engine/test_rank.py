"""One tensor parallel rank, in a group of its own; helpers/in_ranks.py has several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import msrnn
from msrnn.engine.local_executor import LocalExecutor
from msrnn.engine.rank import STOP, Rank, follow
from msrnn.errors import UsageError
from msrnn.hf.tensor_parallel import ProcessShards
from msrnn.recall import Recalling
from tests.helpers.tiny import build, llama, tokens
from tests.helpers.torchrun import NEEDS_GLOO

pytestmark = NEEDS_GLOO
PROMPT = tokens(1, 10)[0].tolist()
Call = tuple[Sequence[int], str, Sequence[Any]]  # states that are dropped, the method, and its arguments


@pytest.fixture
def rnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[msrnn.MultiStateRNN]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    shards = ProcessShards(group, 0, 1, "gloo")
    monkeypatch.setattr("msrnn.hf.inspect.shards_of", lambda _: shards)
    yield msrnn.MultiStateRNN(build(llama(), "cpu"), "tova", 6)
    dist.destroy_process_group()


def test_a_model_of_one_process_has_no_ranks() -> None:
    with pytest.raises(UsageError, match=r"this model is in one process: use msrnn\.Engine"):
        Rank(msrnn.MultiStateRNN(build(llama(), "cpu"), "tova", 6))


def test_states_by_number_are_those_of_an_executor(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    rank, executor = Rank(rnn), LocalExecutor(rnn, slots=2)
    rank.start(2)
    rank.new_state(7)
    state = executor.new_state()
    expected = executor.read_logits(state, PROMPT, last_only=True)
    torch.testing.assert_close(rank.read(7, PROMPT, True), expected)
    rank.copy(8, 7, "host")
    rank.put(1, 8)
    rank.local.batch.next[1] = 5
    rank.move(1, 0)
    logits = rank.step(1)
    torch.testing.assert_close(logits, executor.read_logits(state, [5], last_only=True), atol=1e-5, rtol=1e-5)
    rank.take(9, 0, 11)
    assert {number: found.seen for number, found in rank.states.items()} == {7: 10, 8: 10, 9: 11}
    rank.gather(9).save(tmp_path / "state.safetensors")
    rank.load(3, str(tmp_path / "state.safetensors"))
    assert torch.equal(rank.states[3].state.positions(0), local_positions(executor, state))


def test_a_state_may_have_a_size_of_its_own(rnn: msrnn.MultiStateRNN) -> None:
    rank, alone = Rank(rnn), LocalExecutor(msrnn.MultiStateRNN(rnn.model, "tova", 4), slots=1)
    rank.start(2)
    rank.new_state(7, 4)
    expected = alone.read_logits(alone.new_state(), PROMPT, last_only=True)
    torch.testing.assert_close(rank.read(7, PROMPT, True), expected)


def test_a_rank_recalls_and_frees_archives(rnn: msrnn.MultiStateRNN) -> None:
    recalling = msrnn.MultiStateRNN(rnn.model, "tova", 6, recall=3)
    rank, executor = Rank(recalling), LocalExecutor(recalling, slots=2)
    rank.start(2)
    rank.new_state(7)
    state = executor.new_state()
    for how in (None, Recalling(4, starts=True), Recalling(1, starts=False)):
        expected = executor.read_logits(state, PROMPT, last_only=True, recalling=how)
        torch.testing.assert_close(rank.read(7, PROMPT, True, False, how), expected)
    rank.put(1, 7)
    archives = rank.local.batch.state.layers[0].archives
    assert [archive.end for archive in archives] == [0, 30]
    rank.free(1)
    assert [archive.end for archive in archives] == [0, 0]


def local_positions(executor: LocalExecutor, state: Any) -> torch.Tensor:
    return executor.copy(state, "host").state.positions(0)


def send(monkeypatch: pytest.MonkeyPatch, messages: Sequence[Call]) -> list[Any]:
    """Let a leader rank send these messages -> those that are left."""
    left = [*messages]

    def receive(message: list[Any], *_: Any, **__: Any) -> None:
        message[0] = left.pop(0)

    monkeypatch.setattr(dist, "broadcast_object_list", receive)
    return left


def test_a_rank_serves_calls_until_the_leader_stops(rnn: msrnn.MultiStateRNN, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that every rank has does not end it."""
    begin: list[Call] = [([], "start", [1]), ([], "new_state", [7]), ([], "read", [7, PROMPT, True])]
    failing: list[Call] = [([], "load", [8, "/none"])]
    left = send(monkeypatch, [*begin, *failing, ([], "put", [0, 7]), ([], STOP, []), ([], "keep_alive", [])])
    follow(rnn)
    assert len(left) == 1


def test_a_state_that_the_leader_has_dropped_is_gone(rnn: msrnn.MultiStateRNN, monkeypatch: pytest.MonkeyPatch) -> None:
    send(monkeypatch, [([], "start", [1]), ([], "new_state", [7]), ([7, 70], "read", [7, PROMPT, True])])
    with pytest.raises(KeyError):
        follow(rnn)
