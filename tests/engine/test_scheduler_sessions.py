"""What an engine decides about sessions, and between two lanes, with an executor that has no model."""

from __future__ import annotations

from pathlib import Path

import pytest

from msrnn.engine.engine import Engine
from msrnn.engine.lanes import LongEngine
from tests.helpers.fake_executor import FakeExecutor, answer_to
from tests.helpers.fake_requests import add, conversation, run, text, tokens


@pytest.fixture
def executor(overlaps: bool) -> FakeExecutor:
    return FakeExecutor(slots=4, overlaps=overlaps)


@pytest.mark.parametrize("folder", [False, True])
def test_sessions(overlaps: bool, tmp_path: Path, folder: bool) -> None:
    """Turns go on where the last one ended, with other answers beside them; with a folder, after a restart too."""
    turns = [[5, 6, 7], [8], text(1, 30), [9, 9]]
    engine, found = Engine(FakeExecutor(2, overlaps), sessions=tmp_path if folder else None), []
    for number, turn in enumerate(turns):
        if folder and number == 2:
            engine.close()
            engine = Engine(FakeExecutor(2, overlaps), sessions=tmp_path)
        other = add(engine, text(number, 3), 9)
        found.append(add(engine, turn, 4, "talk"))
        run(engine)
        assert tokens(other) == [answer_to(text(number, 3), 9)]
    assert tokens(*found) == conversation(turns, 4)
    assert engine.sessions.turns("talk") == 4
    engine.close()


def test_a_session_has_one_answer_at_a_time(executor: FakeExecutor) -> None:
    engine = Engine(executor)
    first, second = add(engine, [5], 20, "talk"), add(engine, [6], 20, "talk")
    run(engine, 3)
    assert "is answering another request" in str(second.answers[0].error)
    assert engine.stop_session("talk")
    run(engine)
    assert (first.answers[0].finish_reason, engine.sessions.turns("talk")) == ("stop", 1)
    cut = first.answers[0].tokens
    assert cut == answer_to([5], len(cut))
    third = add(engine, [7], 3, "talk")
    run(engine)
    assert tokens(third) == [answer_to([5, *cut, 7], 3)]


def test_a_cancelled_turn_leaves_its_session_as_it_was(executor: FakeExecutor) -> None:
    engine = Engine(executor)
    add(engine, [5], 3, "talk")
    run(engine)
    cancelled = add(engine, [6], 50, "talk")
    run(engine, 4)
    cancelled.cancel()
    run(engine)
    again = add(engine, [8], 3, "talk")
    run(engine)
    assert tokens(again) == [conversation([[5], [8]], 3)[1]]
    assert engine.sessions.turns("talk") == 2


def test_a_session_of_another_model_is_refused(tmp_path: Path) -> None:
    engine = Engine(FakeExecutor(), sessions=tmp_path)
    add(engine, [5], 3, "talk")
    run(engine)
    engine.close()
    other = Engine(FakeExecutor(policy="another"), sessions=tmp_path)
    refused, sound = add(other, [6], 3, "talk"), add(other, [7], 3)
    run(other)
    assert refused.answers[0].error_code == "session_unreadable"
    assert tokens(sound) == [answer_to([7], 3)]


def test_lanes_take_turns_and_convert_sessions(overlaps: bool) -> None:
    short, long = FakeExecutor(4, overlaps), FakeExecutor(1, overlaps, positions="compressed")
    engine = LongEngine(short, long, length=20)
    requests = [add(engine, [5], 10), add(engine, text(1, 30), 10)]
    run(engine, 12)
    steps = [sum(name == "step" for name, _ in each.calls) for each in (short, long)]
    assert abs(steps[0] - steps[1]) <= 1
    run(engine)
    assert tokens(*requests) == [answer_to([5], 10), answer_to(text(1, 30), 10)]
    turns = [[5, 6], text(2, 30), [7]]
    found = []
    for turn in turns:
        found.append(add(engine, turn, 4, "talk"))
        run(engine)
    assert tokens(*found) == conversation(turns, 4)
    assert engine.sessions.infos()[0].positions == "compressed"
    assert engine.long_requests == 3
    engine.close()
    assert (short.closed, long.closed) == (True, True)
