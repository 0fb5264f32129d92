from __future__ import annotations

import pytest

from msrnn.errors import UsageError
from msrnn.hf.chat_template import opening
from tests.helpers.characters import character_tokenizer


@pytest.mark.parametrize(
    ("template", "reason"),
    [("{{ raise_exception('no system role here') }}", "no system role here"), ("{{ messages + 1 }}", "refuses")],
)
def test_template_that_refuses(template: str, reason: str) -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UsageError, match=reason):
        opening(tokenizer, "hello", "be brief")
