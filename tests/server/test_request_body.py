from __future__ import annotations

import pytest
from pydantic import ValidationError

from msrnn.server.request_body import Body, Text, WholeText


class Form(Body):
    any: Text = ""
    whole: WholeText = ""
    number: int = 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"number": "3"}, "valid integer"),
        ({"number": True}, "valid integer"),
        ({"any": 3}, "instance of str"),
        ({"whole": "a\ud800"}, "half of a character \\(a lone surrogate\\) at 1"),
        ({"other": 1}, "Extra inputs"),
    ],
)
def test_what_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Form.model_validate(given)


def test_a_field_decides_about_half_characters() -> None:
    assert Form.model_validate({"any": "\ud800", "whole": "\U0001f600"}).any == "\ud800"
