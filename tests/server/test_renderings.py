from __future__ import annotations

from typing import Any

import pytest

from msrnn.hf.chat_template import Rendering
from msrnn.server.errors import ApiError
from msrnn.server.renderings import read_rendering
from msrnn.server.request_models import TemplateFields
from tests.helpers.characters import THINKING, character_tokenizer

TOKENIZER: Any = character_tokenizer()
TOKENIZER.chat_template = THINKING


def read(last: str = "user", begins: bool = True, special: bool = False, **fields: Any) -> Rendering:
    return read_rendering(TemplateFields.model_validate(fields), TOKENIZER, last, begins, special)


@pytest.mark.parametrize(
    ("last", "starts", "continues", "end"),
    [
        ("user", None, None, "answer"),
        ("user", True, None, "answer"),
        ("user", None, False, "answer"),
        ("user", False, None, "closed"),
        ("user", False, False, "closed"),
        ("assistant", None, None, "open"),
        ("assistant", None, True, "open"),
        ("assistant", False, True, "open"),
        ("assistant", True, None, "answer"),
        ("assistant", True, False, "answer"),
        ("assistant", None, False, "answer"),
        ("assistant", False, None, "closed"),
        ("assistant", False, False, "closed"),
    ],
)
def test_where_the_text_ends(last: str, starts: bool | None, continues: bool | None, end: str) -> None:
    assert read(last, add_generation_prompt=starts, continue_final_message=continues) == Rendering(end)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("last", "fields", "message"),
    [
        ("assistant", {"add_generation_prompt": True, "continue_final_message": True}, "are both true"),
        ("user", {"continue_final_message": True}, "the last message has the role 'user'"),
        ("system", {"continue_final_message": True}, "the last message has the role 'system'"),
    ],
)
def test_ends_that_contradict_the_messages(last: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message) as error:
        read(last, **fields)
    assert (error.value.status, error.value.param) == (400, "continue_final_message")


def test_variables() -> None:
    assert read().variables == {}
    assert read(chat_template_kwargs={"mood": "glad"}, reasoning_effort="low").variables == {
        "mood": "glad",
        "reasoning_effort": "low",
    }
    assert read(chat_template_kwargs={"reasoning_effort": "odd"}).variables == {"reasoning_effort": "odd"}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "templates have it already"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs", "does not use it"),
        ({"chat_template_kwargs": {"mood": "<end>"}}, "chat_template_kwargs", "text of a special token"),
        (
            {"chat_template_kwargs": {"reasoning_effort": "a"}, "reasoning_effort": "low"},
            "reasoning_effort",
            "is given twice",
        ),
    ],
)
def test_variables_that_are_refused(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError, match=message) as error:
        read(**fields)
    assert (error.value.status, error.value.param) == (400, param)


def test_special_tokens_in_variables_may_be_allowed() -> None:
    assert read(special=True, chat_template_kwargs={"mood": "<end>"}).variables == {"mood": "<end>"}


def test_an_effort_that_the_template_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZER, "chat_template", "{{ messages }}")
    with pytest.raises(ApiError, match="reasoning_effort: variable 'reasoning_effort': this model's chat") as error:
        read(reasoning_effort="low")
    assert error.value.param == "reasoning_effort"
    monkeypatch.setattr(TOKENIZER, "chat_template", None)
    with pytest.raises(ApiError, match="no chat template"):
        read(reasoning_effort="low")


def test_a_session_that_has_begun_keeps_its_beginning() -> None:
    assert read(begins=False, chat_template_kwargs={"mood": "glad"}).variables == {"mood": "glad"}
    with pytest.raises(ApiError, match="which this session has read already") as error:
        read(begins=False, reasoning_effort="low")
    assert error.value.param == "reasoning_effort"


@pytest.mark.parametrize(
    "variables",
    [{"a": "x" * 10_000}, {str(i): 1 for i in range(2000)}, {"a": [[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]}, {"a": "\ud800"}],
)
def test_variables_that_are_too_large(variables: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="chat_template_kwargs"):
        TemplateFields.model_validate({"chat_template_kwargs": variables})
