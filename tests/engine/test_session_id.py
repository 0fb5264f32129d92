from __future__ import annotations

from typing import Any

import pytest

from msrnn.engine.session_id import SessionId, is_owner
from msrnn.errors import UsageError

OWNER = "0123456789abcdef"


def test_a_plain_name_has_no_owner() -> None:
    assert SessionId.of("talk") == SessionId("talk", "")
    session = SessionId("T-a_l9k" + "x" * 57, OWNER)
    assert SessionId.of(session) is session


@pytest.mark.parametrize("name", ["", "../up", "a/b", "a b", "x" * 65, "é", ".hidden", "talk\n", "a=b", 7, None])
def test_names_are_plain(name: Any) -> None:
    with pytest.raises(UsageError, match="must be 1 to 64 letters, digits, hyphens and underscores"):
        SessionId.of(name)


@pytest.mark.parametrize("owner", ["ann", OWNER[:-1], OWNER + "0", OWNER.upper(), "../../../../../up", OWNER + "\n"])
def test_owners_are_hexadecimal(owner: str) -> None:
    assert not is_owner(owner)
    with pytest.raises(UsageError, match="of a session: must be 16 hexadecimal digits"):
        SessionId.of(SessionId("talk", owner))


def test_messages_do_not_show_the_owner() -> None:
    assert is_owner(OWNER)
    assert repr(SessionId("talk", OWNER)) == "session 'talk'"


def test_a_message_is_short() -> None:
    with pytest.raises(UsageError) as refused:
        SessionId.of("/" * 10_000)
    assert len(str(refused.value)) < 200
