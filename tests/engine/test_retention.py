"""Which tokens a state holds, against reading the same tokens one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import msrnn
from msrnn.core.state import MultiState
from msrnn.engine.requests import Event
from msrnn.errors import UsageError
from tests.helpers.tiny import FAMILIES, build, llama

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 20, 21, 33]


def counted(state: MultiState) -> dict[int, float]:
    """The definition, in plain Python: the mean over layers of the share of groups that hold a position."""
    shares: dict[int, float] = {}
    for layer in range(len(state.layers)):
        groups = state.positions(layer)[0].tolist()
        for held in groups:
            for position in {position for position in held if position >= 0}:
                shares[position] = shares.get(position, 0) + 1 / len(groups) / len(state.layers)
    return {position: round(share, 4) for position, share in sorted(shares.items())}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"policy": "h2o"}),
        ("llama", {"state_dtype": "int8"}),
        ("llama", {"positions": "compressed"}),
        ("gemma3", {}),  # layers with sliding windows have sizes of their own
    ],
)
def test_events_tell_what_reading_the_tokens_leaves(family: str, options: dict[str, Any], overlaps: bool) -> None:
    """Beside other answers, whose ends move the row; in a session that goes on, too."""
    policy = options.pop("policy", "tova")
    rnn = msrnn.MultiStateRNN(build(FAMILIES[family](), "cpu"), policy, 9, **options)
    engine = msrnn.Engine(rnn, slots=3)
    read: list[int] = []
    state, steps = rnn.state(), 0
    for turn, prompt in enumerate((PROMPT, [40, 41, 42])):
        for length in (2, 5):
            other = msrnn.SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)
            engine.add(engine.request([30, 31, 32, length], other))
        params = msrnn.SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        request = engine.request(prompt, params, "talk", retention=3)
        engine.add(request)
        events: list[Event] = []
        while not engine.idle:
            events += [event for event in engine.step() if event.request is request]
        told = [number for number, event in enumerate(events, 1) if event.retention is not None]
        assert told == [1, 4, 7, 10, 12]
        tokens = [*read, *prompt, *request.answers[0].tokens]
        for number in told:
            # Where steps overlap, the token of this event has been read as well.
            found, last = events[number - 1].retention, len(read) + len(prompt) + number - 1 + overlaps
            assert found is not None
            for token in tokens[steps:last]:
                rnn.step(torch.tensor([[token]]), state)
            steps = last
            assert found.seen == last
            assert dict(found.list_shares()) == counted(state)
            assert found.used == sum(int((state.positions(layer) >= 0).sum()) for layer in range(len(state.layers)))
            assert found.nbytes == state.nbytes
        read = tokens
        session = engine.sessions.get("talk")
        assert session is not None
        assert session.turns == turn + 1
        assert engine.executor.retention(session.state).list_shares() == events[-1].retention.list_shares()  # type: ignore[union-attr]


def test_nobody_is_told_who_does_not_ask() -> None:
    engine = msrnn.Engine(msrnn.MultiStateRNN(build(llama(), "cpu"), "tova", 9), slots=1)
    engine.add(engine.request(PROMPT, msrnn.SamplingParams(max_tokens=3)))
    events = [event for _ in range(4) for event in engine.step()]
    assert {event.retention for event in events} == {None}
    for bad in (-1, True, 2.5):
        with pytest.raises(UsageError, match="must be a whole number of tokens"):
            engine.request(PROMPT, retention=bad)  # type: ignore[arg-type]
