from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from msrnn.errors import UsageError
from msrnn.hf.chat_template import (
    Rendering,
    changes_beginning,
    check_variables,
    closing,
    count_open_tokens,
    count_system_tokens,
    encode_first,
    encode_following,
    following,
    opening,
    render_conversation,
    with_template,
)
from tests.helpers.characters import END, TEMPLATE, THINKING, character_tokenizer


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


def thinking() -> Any:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = THINKING
    return tokenizer


def as_messages(*contents: str) -> list[dict[str, str]]:
    roles = ["user", "assistant"] * len(contents)
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


BEGINNING = "<s><system>be kind<end>\n<user>hi<end>\n"


def test_where_a_rendered_text_ends() -> None:
    tokenizer = character_tokenizer()
    ends: Any = {
        "answer": BEGINNING + "<model>so<end>\n<model>",
        "closed": BEGINNING + "<model>so<end>\n",
        "open": BEGINNING + "<model>so",
    }
    for end, text in ends.items():
        rendering = Rendering(end)
        assert render_conversation(tokenizer, as_messages("hi", "so"), rendering) == text
        ids = encode_first(tokenizer, as_messages("hi", "so"), rendering)
        assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("content", ["e", "\n", "<end>", "<model>", "hi", "be kind", "", " ", "a ", "end>"])
def test_an_open_message_ends_with_its_content(content: str) -> None:
    """Not with the last place where the text of the template has the same characters."""
    tokenizer = character_tokenizer()
    messages, rendering = as_messages("hi", content), Rendering("open")
    assert render_conversation(tokenizer, messages, rendering) == f"{BEGINNING}<model>{content}"
    ids = encode_first(tokenizer, messages, rendering)
    assert tokenizer.decode(ids) == f"{BEGINNING}<model>{content}"
    assert ids.count(END) == 2  # those of the template: contents are text


def test_an_open_message_that_the_template_strips() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("m['content']", "m['content'].strip()")
    assert render_conversation(tokenizer, as_messages("hi", " so "), Rendering("open")) == f"{BEGINNING}<model>so"
    tokenizer.chat_template = TEMPLATE.replace("m['content']", "m['content'].upper()")
    with pytest.raises(UsageError, match="changes messages, so the last one cannot be continued"):
        render_conversation(tokenizer, as_messages("hi", "so"), Rendering("open"))


def test_variables_of_a_template() -> None:
    tokenizer, rendering = thinking(), Rendering(variables={"mood": "glad:", "reasoning_effort": "low"})
    text = render_conversation(tokenizer, as_messages("hi"), rendering)
    assert text == BEGINNING.replace("<s>", "<s>[low]") + "<model>glad:"
    assert tokenizer.decode(encode_first(tokenizer, as_messages("hi"), rendering)) == text
    later = following(tokenizer, "on", rendering)
    assert (closing(tokenizer, rendering), later) == ("<end>\n", "<user>on<end>\n<model>glad:")
    assert tokenizer.decode(encode_following(tokenizer, "on", rendering)) == later
    assert following(tokenizer, "on", Rendering("closed", {"mood": "glad:"})) == "<user>on<end>\n"


def test_variables_that_change_the_beginning() -> None:
    assert changes_beginning(thinking(), {"reasoning_effort": "low"})
    assert not changes_beginning(thinking(), {"mood": "glad"})
    assert not changes_beginning(thinking(), {"reasoning_effort": ""})


@pytest.mark.parametrize(
    "name",
    ["chat_template", "tokenize", "messages", "tools", "add_generation_prompt", "return_dict", "bos_token", "kwargs"],
)
def test_variables_that_a_template_has_already(name: str) -> None:
    with pytest.raises(UsageError, match=f"variable '{name}': chat templates have it already; leave it out"):
        check_variables(thinking(), {name: "x"}, allow_special=True)


@pytest.mark.parametrize("name", ["enable_thinking", "moo", "mood ", "", "be kind", "m['content']", "x" * 9999])
def test_variables_that_a_template_ignores(name: str) -> None:
    with pytest.raises(UsageError, match="this model's chat template does not use it; leave it out") as error:
        check_variables(thinking(), {name: "x"}, allow_special=True)
    assert len(str(error.value)) < 250


@pytest.mark.parametrize("value", ["<end>", "a<end>", ["<end>"], {"<end>": 1}, {"a": [{"b": "x<end>y"}]}])
def test_a_variable_cannot_write_special_tokens(value: Any) -> None:
    with pytest.raises(UsageError, match="variable 'mood': has the text of a special token"):
        check_variables(thinking(), {"mood": value}, allow_special=False)
    check_variables(thinking(), {"mood": value}, allow_special=True)


def test_variables_that_are_fine() -> None:
    check_variables(thinking(), {"mood": [1, None, "end", {"a": True}], "reasoning_effort": "low"}, allow_special=False)


@pytest.mark.parametrize("content", ["so", "0", "1", "", "<end>", "hi"])
def test_the_tokens_of_an_open_message(content: str) -> None:
    tokenizer, messages = character_tokenizer(), as_messages("hi", content)
    encode_again = partial(encode_first, tokenizer, rendering=Rendering("open"))
    tokens = encode_again(messages)
    count = count_open_tokens(messages, tokens, encode_again)
    assert tokenizer.decode(tokens[len(tokens) - count :]) == content


def test_another_template_is_that_of_a_copy() -> None:
    tokenizer = character_tokenizer()
    other = with_template(tokenizer, THINKING)
    assert (tokenizer.chat_template, other.chat_template) == (TEMPLATE, THINKING)
    assert other("a<end>")["input_ids"] == tokenizer("a<end>")["input_ids"]
