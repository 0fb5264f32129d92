from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from msrnn.errors import UsageError
from msrnn.evaluation.data.conversations import NOT_MENTIONED, Conversation, limit_questions, load_conversations
from tests.helpers.long_chat import ANN_AND_BEN, CARA_AND_DAN, write_chats

TEXT = """DATE: 1:30 pm on 2 January, 2024
CONVERSATION:
Ann said, "I bought a boat!"
Ben said, "Look." [shares a photo of a cat]

DATE: 9:00 am on 3 March, 2024
CONVERSATION:
Ann said, "The boat is blue now.\""""


@pytest.fixture
def chats(tmp_path: Path) -> list[Conversation]:
    return load_conversations(write_chats(tmp_path / "chats.json"))


def test_sessions_are_in_order_below_their_dates(chats: list[Conversation]) -> None:
    """By number, not by name; a session without turns is left out; a picture is its caption."""
    assert [one.name for one in chats] == ["ann-ben", "cara-dan"]
    assert chats[0].text == TEXT


def test_questions_of_all_categories(chats: list[Conversation]) -> None:
    found = {one.category: one for one in chats[0].questions}
    assert [one.category for one in chats[0].questions] == [2, 1, 3, 4, 5]
    assert (found[2].expected, found[2].evidence) == ("2024", ("D2:1",))
    assert found[3].expected == "Likely yes; she sails"
    assert found[5].expected == NOT_MENTIONED
    assert {*found[5].choices} == {NOT_MENTIONED, "a boat"}
    assert not any(found[category].choices for category in (1, 2, 3, 4))


def test_both_orders_of_choices_occur_and_do_not_change(tmp_path: Path) -> None:
    sample = deepcopy(ANN_AND_BEN)
    sample["qa"] = [
        {"question": f"What is {i}?", "category": 5, "evidence": [], "adversarial_answer": "x"} for i in range(20)
    ]
    path = write_chats(tmp_path / "chats.json", sample)
    first = [one.choices.index(NOT_MENTIONED) for one in load_conversations(path)[0].questions]
    assert {*first} == {0, 1}
    assert first == [one.choices.index(NOT_MENTIONED) for one in load_conversations(path)[0].questions]


def test_earlier_files_have_the_wrong_answer_as_the_answer(tmp_path: Path) -> None:
    sample = deepcopy(CARA_AND_DAN)
    sample["qa"] = [{"question": "Who paints?", "answer": "Dan", "category": 5}]
    (question,) = load_conversations(write_chats(tmp_path / "one.json", sample))[0].questions
    assert {*question.choices} == {NOT_MENTIONED, "Dan"}


def test_one_conversation_alone(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps({**CARA_AND_DAN, "sample_id": None}))
    assert [one.name for one in load_conversations(path)] == ["1"]


def test_a_smaller_limit_is_part_of_a_larger_one(chats: list[Conversation]) -> None:
    assert limit_questions(chats, None) == limit_questions(chats, 100) == chats
    before: set[str] = set()
    for limit in range(1, 8):
        chosen = limit_questions(chats, limit)
        asked = {question.question for one in chosen for question in one.questions}
        assert len(asked) == limit
        assert before < asked
        before = asked
    # One conversation is asked about in full before the next one is read.
    assert len(limit_questions(chats, 2)) == 1
    assert len(limit_questions(chats, 6)) == 2


def broken(**change: Any) -> dict[str, Any]:
    return {**deepcopy(CARA_AND_DAN), **change}


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (7, "conversation 1: not in the format of LoCoMo"),
        (broken(qa=[]), "has no question"),
        (broken(qa=[{"question": "?", "category": 6, "answer": "x"}]), "qa.0.category"),
        (broken(qa=[{"question": "Why?", "category": 4}]), "the question 'Why?' has no answer"),
        (broken(qa=[{"question": "Why?", "category": 5}]), "the question 'Why?' has no answer"),
        (broken(conversation={}), "has no turns"),
        (broken(conversation={"session_1": [{"speaker": "A", "text": "x"}]}), "session_1 has no session_1_date_time"),
        (broken(conversation={"session_1": [{"text": "x"}], "session_1_date_time": "x"}), "session_1: not in the"),
    ],
)
def test_files_that_are_refused(sample: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        load_conversations(write_chats(tmp_path / "chats.json", sample))


def test_conversations_have_names_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="same sample_id"):
        load_conversations(write_chats(tmp_path / "chats.json", CARA_AND_DAN, CARA_AND_DAN))


def test_a_file_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "chats.json").write_text("hello")
    with pytest.raises(UsageError, match="not JSON"):
        load_conversations(tmp_path / "chats.json")
    with pytest.raises(UsageError, match="no such file"):
        load_conversations(tmp_path / "none.json")
