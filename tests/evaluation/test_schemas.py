from __future__ import annotations

from msrnn.evaluation.schemas import ChunkSchema, Schema, check_of


class Losses(ChunkSchema):
    nll: list[float]
    size: int | None


def test_the_reason_why_a_row_is_damaged() -> None:
    check = check_of(Losses)
    good = {"chunks": ["a"], "nll": [1.5], "size": None}
    assert check(good) is None
    assert check({**good, "nll": [1], "more": "\ud800", "chunks": ["\ud800"]}) is None
    for change, reason in (
        ({"nll": [1, 2]}, "1 chunks with 2 nll"),
        ({"nll": "12"}, "its field 'nll' is '12'"),
        ({"nll": ["12"]}, "its field 'nll' is ['12']"),
        ({"nll": [True]}, "its field 'nll' is [True]"),
        ({"size": True}, "its field 'size' is True"),
        ({"size": 1.0}, "its field 'size' is 1.0"),
        ({"chunks": None}, "its field 'chunks' is None"),
        ({"chunks": [1]}, "its field 'chunks' is [1]"),
    ):
        assert check({**good, **change}) == reason
    assert check({"chunks": ["a"], "size": 3}) == "without the field 'nll'"


class Name(Schema):
    name: str


def test_a_record_may_have_more_fields_and_a_reason_is_short() -> None:
    check = check_of(Name)
    assert check({"name": "a", "more": [1]}) is None
    found = check({"name": list(range(10_000))})
    assert found is not None
    assert len(found) < 100
