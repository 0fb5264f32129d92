from __future__ import annotations

from pathlib import Path

import pytest

from msrnn.errors import UsageError
from msrnn.evaluation.data.chat_prompts import ask_questions, write_request
from msrnn.evaluation.data.conversations import NOT_MENTIONED, ChatQuestion, Conversation, load_conversations
from msrnn.evaluation.data.prompts import prompt_ids
from tests.helpers.characters import character_tokenizer
from tests.helpers.long_chat import write_chats

TOKENIZER = character_tokenizer()


@pytest.fixture
def chat(tmp_path: Path) -> Conversation:
    return load_conversations(write_chats(tmp_path / "chats.json"))[0]


@pytest.mark.parametrize("template", [True, False])
def test_all_prompts_begin_with_the_conversation(chat: Conversation, template: bool) -> None:
    asked = ask_questions(TOKENIZER, chat, template)
    assert len({one.head for one in asked}) == 1
    assert len({one.key for one in asked}) == len(asked) == 5
    head = TOKENIZER.decode(asked[0].head)
    assert head.endswith(chat.text + "\n\n")
    for one, question in zip(asked, chat.questions, strict=True):
        end = "<end>\n<model>" if template else "\n\nShort answer:"
        assert TOKENIZER.decode(one.tail) == write_request(question) + end
        whole = head.partition("Below")
        text = "".join(whole[1:]) + write_request(question) + ("" if template else "\n\nShort answer:")
        assert [*one.head, *one.tail] == prompt_ids(TOKENIZER, text, template)


def test_requests_by_category() -> None:
    assert write_request(ChatQuestion("Who {a}?", 4, "x")).endswith("Question: Who {a}?")
    assert "DATE" in write_request(ChatQuestion("When?", 2, "x"))
    assert "DATE" not in write_request(ChatQuestion("When?", 1, "x"))
    adversarial = write_request(ChatQuestion("Who?", 5, NOT_MENTIONED, ("Ann", NOT_MENTIONED)))
    assert f"(a) Ann (b) {NOT_MENTIONED}" in adversarial


def test_what_identifies_a_question(chat: Conversation) -> None:
    one = ask_questions(TOKENIZER, chat, True)[0]
    for other in (
        one._replace(tail=one.tail[:-1]),
        one._replace(head=one.head[1:]),
        one._replace(question=one.question._replace(expected="x")),
    ):
        assert other.key != one.key
    assert one._replace(question=one.question._replace(evidence=())).key == one.key


class ShiftingTokenizer:
    """Its first token depends on the length of the text."""

    chat_template = None

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [len(text) > 400, *map(ord, text)]}


def test_a_tokenizer_whose_first_tokens_depend_on_the_question(chat: Conversation) -> None:
    with pytest.raises(UsageError, match="cannot be read once for all"):
        ask_questions(ShiftingTokenizer(), chat, False)


def test_a_model_without_a_chat_template(chat: Conversation) -> None:
    plain = character_tokenizer()
    plain.chat_template = None
    with pytest.raises(UsageError, match="no chat template"):
        ask_questions(plain, chat, True)
