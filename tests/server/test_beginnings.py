from __future__ import annotations

import pytest

from msrnn.server.beginnings import Beginning, digest


@pytest.mark.parametrize("tools", ["", "a" * 32])
@pytest.mark.parametrize("instructions", ["", digest("be brief")])
def test_a_name_has_all_parts_and_fits_in_a_session_file(tools: str, instructions: str) -> None:
    beginning = Beginning(tools, instructions)
    assert Beginning.parse(beginning.name) == beginning
    assert len(beginning.name) <= 64


def test_names_of_tools_alone_are_those_of_older_sessions() -> None:
    assert Beginning.parse("a" * 32) == Beginning("a" * 32, "")
    assert Beginning("a" * 32).name == "a" * 32


def test_digests_differ() -> None:
    assert len({digest(text) for text in ("", "a", "b", "a ")}) == 4
