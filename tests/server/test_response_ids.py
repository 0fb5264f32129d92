from __future__ import annotations

import pytest

from msrnn.engine.session_id import SessionId
from msrnn.server.affinity import assign_replica
from msrnn.server.response_ids import ResponseId, make_session_name, parse_response_id

NAME = f"resp_{'0' * 32}"


def test_an_id_has_the_session_and_the_turn() -> None:
    name = make_session_name(lambda _: True)
    SessionId(name).check()
    assert parse_response_id(str(ResponseId(name, 12))) == (name, 12)
    assert parse_response_id(name) is None


@pytest.mark.parametrize(
    "text",
    [
        *("", "ann_1", "resp_1", f"resp_{'0' * 31}_1", f"resp_{'A' * 32}_1"),
        *(f"{NAME}_{turn}" for turn in ("", "0", "01", "1\n", "\u0661", "9" * 99)),
    ],
)
def test_other_texts_are_no_ids(text: str) -> None:
    assert parse_response_id(text) is None


def test_a_name_belongs_to_the_replica_that_makes_it() -> None:
    for number in range(3):

        def owns(name: str, number: int = number) -> bool:
            return assign_replica(name, 3) == number

        names = {make_session_name(owns) for _ in range(5)}
        assert len(names) == 5
        assert {assign_replica(name, 3) for name in names} == {number}
