from __future__ import annotations

from functools import partial

import pytest

from msrnn.errors import UsageError
from msrnn.hf.chat_template import count_system_tokens, encode_first, opening
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


SYSTEM = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize("message", ["hello", "0", "1", "01"])
def test_the_system_message_is_what_the_question_does_not_change(message: str) -> None:
    tokenizer = character_tokenizer()
    messages = [SYSTEM, {"role": "user", "content": message}]
    tokens = encode_first(tokenizer, messages)
    count = count_system_tokens(messages, tokens, partial(encode_first, tokenizer))
    text = tokenizer.decode(tokens[:count])
    assert "be brief" in text
    assert message not in text
    assert tokenizer.decode(tokens[count:]).startswith(message)


def test_without_a_system_message_there_is_none() -> None:
    tokenizer = character_tokenizer()
    messages = [{"role": "user", "content": "hello"}]
    assert count_system_tokens(messages, encode_first(tokenizer, messages), partial(encode_first, tokenizer)) == 0
    assert count_system_tokens([SYSTEM], [1, 2, 3], partial(encode_first, tokenizer)) == 3
