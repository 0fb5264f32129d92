from __future__ import annotations

from typing import Any

import pytest

from msrnn.server.affinity import BLOCK, SLACK, SeenPrefixes, assign_replica, blocks_of, choose_replica, text_of


def test_a_session_has_one_replica_for_ever() -> None:
    assert [assign_replica(name, 3) for name in ("talk", "Talk", "a", "b")] == [1, 1, 0, 2]
    assert {assign_replica(f"s{number}", 4) for number in range(100)} == {0, 1, 2, 3}
    assert 0 <= assign_replica("\udcff", 3) < 3  # a file may have any name


def test_blocks_are_those_of_a_common_prefix() -> None:
    one, other = blocks_of("x" * 3 * BLOCK + "a"), blocks_of("x" * 2 * BLOCK + "y" * BLOCK)
    assert (len(one), len(other)) == (3, 3)
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert blocks_of("x" * (BLOCK - 1)) == []
    assert not {*one} & {*blocks_of("x" * 3 * BLOCK, "an owner")}


def test_the_replica_with_the_longest_prefix() -> None:
    seen = SeenPrefixes()
    seen.add([b"1", b"2"], 0)
    seen.add([b"1", b"2", b"3"], 1)
    assert seen.find([b"1", b"2", b"3", b"4"]) == 1
    seen.add([b"1"], 2)
    assert (seen.find([b"1"]), seen.find([b"1", b"2"]), seen.find([b"5"]), seen.find([])) == (2, 1, None, None)


def test_prefixes_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.server.affinity.MOST_BLOCKS", 2)
    seen = SeenPrefixes()
    for number in range(3):
        seen.add([bytes([number])], number)
        seen.add([b"\0"], 0)  # it is used again and again
    assert [seen.find([bytes([number])]) for number in range(3)] == [0, None, 2]


def test_affinity_is_ignored_when_loads_are_uneven() -> None:
    seen = SeenPrefixes()
    seen.add([b"1"], 0)
    assert choose_replica(seen, [b"1"], {0: 2 * 3 + SLACK, 1: 3}) == 0
    assert choose_replica(seen, [b"1"], {0: 2 * 3 + SLACK + 1, 1: 3}) == 1
    assert choose_replica(seen, [b"1"], {1: 5, 2: 4}) == 2  # it is down
    assert choose_replica(seen, [b"9"], {0: 2, 1: 1}) == 1


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": "hello"}, "hello"),
        ({"prompt": ["hello", "more"]}, "hello"),
        ({"prompt": [1, 2]}, "[1, 2]"),
        ({"prompt": [[1, 2], [3]]}, "[1, 2]"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}, "user:a\nuser:b\n"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, 3]}, "odd"]}, "user:a3\n"),
        ([], ""),
        ({"prompt": []}, "[]"),
    ],
)
def test_the_text_of_any_body(body: Any, text: str) -> None:
    assert text_of(body) == text
