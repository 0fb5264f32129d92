from __future__ import annotations

from typing import Any

import pytest

from msrnn.engine.session_files import Session
from msrnn.errors import UsageError
from msrnn.hf.chat_template import Rendering
from msrnn.hf.tool_template import show_tool
from msrnn.server.errors import ApiError
from msrnn.server.message_models import Message
from msrnn.server.prompts import Chat, Prompt, check_answers, echo_of, read_messages, read_prompts
from msrnn.server.request_models import CompletionRequest
from tests.helpers.characters import BOS, END, character_tokenizer
from tests.helpers.fake_executor import FakeState
from tests.helpers.tool_templates import tool_tokenizer

TOKENIZER: Any = character_tokenizer()
FIRST = "<s><system>be kind<end>\n<user>hi<end>\n<model>"
FOLLOWING = "<end>\n<user>hi<end>\n<model>"


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return found


def completion(prompt: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": prompt})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["a"] * 5}, "prompt"),
        ({"prompt": ["a"] * 2, "n": 3}, "prompt"),
        ({"prompt": [[1]] * 5}, "prompt"),
        ({"prompt": "a", "n": 5}, "n"),
        ({"prompt": [1, 2, 3], "n": 5}, "n"),
        ({"messages": [], "n": 10**30}, "n"),
    ],
)
def test_more_answers_than_a_server_takes(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError, match="this server takes 4 at most") as error:
        check_answers(body, 4)
    assert (error.value.status, error.value.param) == (400, param)


@pytest.mark.parametrize(
    "body", [{"prompt": ["a"] * 4}, {"prompt": [1] * 9}, {"n": 4}, {"n": "9"}, {"n": True}, [], None]
)
def test_as_many_answers_as_a_server_takes(body: Any) -> None:
    check_answers(body, 4)  # a wrong n is refused with its type, later


def test_texts_and_tokens_of_prompts() -> None:
    request = completion(["ab", [7, 8]])
    first, second = read_prompts(request, TOKENIZER, True, 100)
    assert first == Prompt([BOS, *ids("ab")], "ab")
    assert second == Prompt([7, 8], None)
    assert read_prompts(request, TOKENIZER, False, 100)[0].tokens == ids("ab")


def test_prompts_that_are_refused() -> None:
    with pytest.raises(ApiError, match="prompt is empty") as error:
        read_prompts(completion(["a", ""]), TOKENIZER, False, 100)
    assert error.value.param == "prompt"
    with pytest.raises(ApiError, match="5,000 characters are more than 100 tokens") as error:
        read_prompts(completion("a" * 5000), TOKENIZER, True, 100)
    assert (error.value.param, error.value.code) == ("max_tokens", "context_length_exceeded")


def test_an_echo_is_the_text_that_was_sent() -> None:
    assert echo_of(Prompt([BOS, *ids("abc")], "abc"), TOKENIZER) == ("abc", [0, 0, 1, 2])
    assert echo_of(Prompt([BOS, *ids("abc")], None), TOKENIZER) == ("abc", [0, 0, 1, 2])


def test_roles_and_texts_of_messages() -> None:
    parts: Any = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    sent = [{"role": "developer", "content": "a"}, {"role": "user", "content": parts}]
    found = read_messages([*map(Message.model_validate, sent)])
    assert found == [{"role": "system", "content": "a"}, {"role": "user", "content": "bc"}]


def chat(content: str = "hi", last: int | None = None, began: bool = False, special: bool = False) -> Chat:
    session = Session(FakeState([5]), [], last, 1, 0.0, 0.0) if began else None
    return Chat(TOKENIZER, [{"role": "user", "content": content}], session, special)


def test_the_first_turn_of_a_chat() -> None:
    assert chat().text(chat().messages) == FIRST
    assert chat().tokens(100) == ids(FIRST)


@pytest.mark.parametrize(("last", "skipped"), [(None, 0), (7, 0), (END, 1)])
def test_a_later_turn_ends_the_answer_before_it_once(last: int | None, skipped: int) -> None:
    assert chat(last=last, began=True).tokens(100) == ids(FOLLOWING)[skipped:]


@pytest.mark.parametrize("began", [False, True])
def test_special_tokens_in_a_message_are_text(began: bool) -> None:
    plain, special = (chat("a<end>", began=began, special=allow).tokens(100) for allow in (False, True))
    assert special.count(END) == plain.count(END) + 1
    assert TOKENIZER.decode(plain) == TOKENIZER.decode(special)


def test_a_session_that_has_begun_takes_one_message() -> None:
    two = chat(began=True)._replace(messages=[{"role": "user", "content": "a"}] * 2)
    with pytest.raises(UsageError, match="continues with one message of the user"):
        two.tokens(100)
    with pytest.raises(ApiError) as error:
        chat("a" * 5000, began=True).tokens(100)
    assert error.value.code == "context_length_exceeded"


def test_a_session_that_has_begun_takes_results() -> None:
    tokenizer = tool_tokenizer("hermes")
    session = Session(FakeState([5]), [], None, 1, 0.0, 0.0)
    results = [{"role": "tool", "content": text, "tool_call_id": "a"} for text in ("x", "y")]
    for special in (False, True):
        found = Chat(tokenizer, results, session, special)
        text = found.text(results)
        assert text.startswith("<end>\n<user>\n<tool_response>\nx\n</tool_response>\n<tool_response>\ny")
        assert tokenizer.decode(found.tokens(500)) == text
    with pytest.raises(UsageError, match="or results of its calls"):
        Chat(tokenizer, [*results, {"role": "user", "content": "z"}], session, False).tokens(500)


def test_tools_before_the_first_question_are_protected_as_the_system_message_is() -> None:
    tokenizer = tool_tokenizer("hermes")
    variables = {"tools": [show_tool("known", "a tool", None)]}
    found = Chat(tokenizer, [{"role": "user", "content": "hi"}], None, False, Rendering(variables=variables))
    tokens = found.tokens(500)
    assert tokenizer.decode(tokens[: found.count_system_tokens(tokens)]).endswith("<end>\n<user>")
    plain = found._replace(rendering=Rendering())
    assert plain.count_system_tokens(plain.tokens(500)) == 0
