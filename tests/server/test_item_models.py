from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from msrnn.server.item_models import ITEMS, Items, MessageItem
from tests.helpers.bad_bodies import VALUES

ADAPTER = TypeAdapter[Any](Items)


def test_a_text_is_a_message_of_the_user() -> None:
    assert ADAPTER.validate_python("a", strict=True) == [MessageItem(role="user", content="a")]
    assert ADAPTER.validate_python("a", strict=True) == ADAPTER.validate_python([{"role": "user", "content": "a"}])


def test_the_types_are_those_of_the_classes() -> None:
    for name, kind in ITEMS.items():
        assert kind.model_json_schema()["properties"]["type"]["const"] == name


@given(
    st.lists(
        st.one_of(
            st.sampled_from(VALUES),
            st.dictionaries(st.sampled_from(["type", "role", "content", "output"]), st.sampled_from(VALUES)),
        )
    )
)
def test_any_json_is_items_or_refused(value: Any) -> None:
    try:
        found = ADAPTER.validate_python(value, strict=True)
    except ValidationError:
        return
    assert len(found) == len(value)


@pytest.mark.parametrize("extra", ["namespace", "caller", "phase"])
def test_fields_that_are_not_known_are_refused(extra: str) -> None:
    with pytest.raises(ValidationError):
        ADAPTER.validate_python([{"role": "user", "content": "a", extra: "b"}], strict=True)
    assert ADAPTER.validate_python([{"role": "user", "content": "a", extra: None}], strict=True)
