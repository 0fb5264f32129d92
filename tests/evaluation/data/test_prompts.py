from __future__ import annotations

import string
from types import SimpleNamespace
from typing import Any

import pytest

from msrnn.errors import UsageError
from msrnn.evaluation.data.prompts import (
    JUDGE,
    QASPER,
    SQUALITY,
    STORY,
    Prompt,
    PromptBuilder,
    fill_template,
    prompt_ids,
)
from msrnn.evaluation.data.questions import Question
from tests.helpers.characters import BOS, character_tokenizer

TOKENIZER: Any = character_tokenizer()
TEMPLATE = "{document}|{question}|"
QUESTION = Question("a/1", "a", string.ascii_lowercase, "why?", [])


def test_what_replaces_a_name_may_have_braces() -> None:
    assert fill_template("{a} and {b}", a="{b}", b="{a}") == "{b} and {a}"
    assert fill_template("{b}{a}", a="1", b="2") == "21"
    with pytest.raises(ValueError, match="substring not found"):
        fill_template("{a}", b="1")


@pytest.mark.parametrize(("template", "names"), [(SQUALITY, 2), (QASPER, 2), (STORY, 0), (JUDGE, 3)])
def test_the_names_of_a_template(template: str, names: int) -> None:
    assert sum(field is not None for _, field, _, _ in string.Formatter().parse(template)) == names


def test_bare_prompts_and_chats() -> None:
    assert TOKENIZER.decode(prompt_ids(TOKENIZER, "hi", chat=False)) == "<s>hi"
    assert TOKENIZER.decode(prompt_ids(TOKENIZER, "hi", chat=True)).endswith("<user>hi<end>\n<model>")
    assert prompt_ids(TOKENIZER, "hi", chat=True).count(BOS) == 1


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("letters", [1, 25, 26])
def test_the_end_of_a_document_is_cut(chat: bool, letters: int) -> None:
    builder = PromptBuilder(TOKENIZER, TEMPLATE, chat)
    whole = builder.build(QUESTION, 10_000)
    assert whole.cut == 0
    found = builder.build(QUESTION, len(whole.ids) - 26 + letters)
    assert (len(found.ids), found.cut) == (len(whole.ids) - 26 + letters, 26 - letters)
    assert f"{string.ascii_lowercase[:letters]}|why?|" in TOKENIZER.decode(found.ids)


def test_a_question_that_does_not_fit() -> None:
    builder = PromptBuilder(TOKENIZER, TEMPLATE, False)
    with pytest.raises(UsageError, match="most=7: question a/1 alone takes 7 tokens; use a larger number"):
        builder.build(QUESTION, 7, "most")


def test_tokenizers_that_are_refused() -> None:
    with pytest.raises(UsageError, match="SimpleNamespace: does not report where tokens end in a text"):
        PromptBuilder(SimpleNamespace(is_fast=False), TEMPLATE, False)
    plain = character_tokenizer()
    plain.chat_template = None
    with pytest.raises(UsageError, match="template"):
        PromptBuilder(plain, TEMPLATE, True)


def test_a_prompt_is_identified_by_its_tokens() -> None:
    keys = {Prompt(ids, 0).key for ids in ([1, 2], [2, 1], [1, 2, 0])}
    assert len(keys) == 3
    assert Prompt([1, 2], 0).key == Prompt([1, 2], 7).key
