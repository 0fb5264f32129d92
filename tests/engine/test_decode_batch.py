from __future__ import annotations

import pytest
import torch

import msrnn
from msrnn.engine.decode_batch import DecodeBatch, bucket_sizes, fitting_slots
from msrnn.errors import UsageError
from tests.helpers.tiny import build, hybrid, llama, tokens


@pytest.fixture(scope="module")
def rnn() -> msrnn.MultiStateRNN:
    return msrnn.MultiStateRNN(build(llama(), "cpu"), "tova", 6)


def prefill(rnn: msrnn.MultiStateRNN, ids: torch.Tensor) -> msrnn.MultiState:
    state = rnn.state()
    rnn.read(ids[None], state)
    return state


@pytest.mark.parametrize(
    ("slots", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (5, [1, 2, 3, 4, 5]),
        (8, [1, 2, 3, 4, 6, 8]),
        (20, [1, 2, 3, 4, 6, 8, 12, 16, 20]),
    ],
)
def test_batch_sizes_that_a_graph_is_captured_for(slots: int, sizes: list[int]) -> None:
    assert bucket_sizes(slots) == sizes


def test_slots_that_fit_the_memory(rnn: msrnn.MultiStateRNN, monkeypatch: pytest.MonkeyPatch) -> None:
    one = rnn.spec.nbytes(1)
    for free, others, slots in (
        (one * 5 * 5 // 4, 0, 5),
        (one * 10, 1, 4),
        (0, 0, 1),
        (None, 0, 8),
        (one * 10**6, 0, 8),
    ):
        monkeypatch.setattr("msrnn.engine.decode_batch.available_bytes", lambda _, free=free: free)
        assert fitting_slots(rnn, others) == slots


def test_the_first_slots_decode_as_they_do_alone(rnn: msrnn.MultiStateRNN) -> None:
    texts, following = tokens(3, 10), tokens(3, 4, seed=2)
    batch = DecodeBatch(rnn, 4)
    states = [prefill(rnn, ids) for ids in texts]
    for slot, state in enumerate(states):
        batch.put(slot, state)
    for step in following.T:
        batch.next[:3, 0] = step
        logits = batch.step(3)
        assert logits.shape == (3, 97)
        expected = torch.cat(
            [rnn.step(token.view(1, 1), state)[:, -1] for token, state in zip(step, states, strict=True)]
        )
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert batch.state.seen.tolist() == [14, 14, 14, 0]
    taken = batch.take(1, 14)
    assert (taken.batch_size, int(taken.seen[0])) == (1, 14)
    assert torch.equal(taken.positions(0), states[1].positions(0))


def test_a_slot_that_moves_takes_its_next_token_along(rnn: msrnn.MultiStateRNN) -> None:
    batch = DecodeBatch(rnn, 3)
    state = prefill(rnn, tokens(1, 10)[0])
    batch.put(2, state)
    batch.next[2] = 7
    batch.move(2, 0)
    torch.testing.assert_close(batch.step(1), rnn.step(torch.tensor([[7]]), state)[:, -1], atol=1e-5, rtol=1e-5)


def test_a_step_of_empty_slots_leaves_them_as_they_are(rnn: msrnn.MultiStateRNN) -> None:
    batch = DecodeBatch(rnn, 2)
    batch.step(2)
    state = prefill(rnn, tokens(1, 10)[0])
    batch.put(0, state)
    batch.next[0] = 7
    torch.testing.assert_close(batch.step(1), rnn.step(torch.tensor([[7]]), state)[:, -1], atol=1e-5, rtol=1e-5)


def test_states_that_grow_are_refused(rnn: msrnn.MultiStateRNN) -> None:
    with pytest.raises(UsageError, match="the engine needs states of a fixed size in every layer: give a policy"):
        DecodeBatch(msrnn.MultiStateRNN(rnn.model, "full"), 2)
    with pytest.raises(UsageError, match="without linear-attention layers"):
        DecodeBatch(msrnn.MultiStateRNN(hybrid(), "tova", 6), 2)
