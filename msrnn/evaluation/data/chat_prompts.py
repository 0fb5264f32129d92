"""Questions about a conversation as prompts that share their first tokens: the conversation is read once for all.

The wording is this project's, after the prompts of LoCoMo's authors: a short answer in exact words of the conversation,
the date of the session for temporal questions, and two choices for adversarial ones.
"""

from __future__ import annotations

import hashlib
import json
from itertools import takewhile
from typing import Any, NamedTuple

from msrnn.errors import UsageError
from msrnn.evaluation.data.conversations import ADVERSARIAL, TEMPORAL, ChatQuestion, Conversation
from msrnn.evaluation.data.prompts import Prompt, fill_template, prompt_ids
from msrnn.hf import chat_template

WHOLE = """Below is a conversation of two people over many days. The date of each part is written above it.

{conversation}

{request}"""
REQUEST = """Write a short answer to the following question about the conversation, in a few words and not in full \
sentences. Use exact words of the conversation whenever possible.

Question: {question}"""
WHEN = " Use the DATE of the conversation to answer with an approximate date."
CHOOSE = """Answer the following question about the conversation.

Question: {question} Select the right answer: (a) {a} (b) {b}. Write (a) or (b)."""
LEAD = "\n\nShort answer:"  # without a chat template


class AskedQuestion(NamedTuple):
    """A question, and its prompt: tokens that all questions of the conversation begin with, and the rest."""

    conversation: str
    question: ChatQuestion
    head: tuple[int, ...]
    tail: tuple[int, ...]

    @property
    def key(self) -> str:
        """A digest of the prompt and of what is expected."""
        prompt = Prompt([*self.head, *self.tail], 0)
        content = [prompt.key, self.question.category, self.question.expected, self.question.choices]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def ask_questions(tokenizer: Any, conversation: Conversation, chat: bool) -> list[AskedQuestion]:
    """The prompt of each question, tokenized as one text, and cut where the conversation ends."""
    if chat:
        chat_template.check_template(tokenizer)

    def encode(request: str) -> tuple[int, ...]:
        whole = fill_template(WHOLE, conversation=conversation.text, request=request)
        return tuple(prompt_ids(tokenizer, whole if chat else whole + LEAD, chat))

    head = _common_prefix(encode("A"), encode("Q"))
    asked = []
    for question in conversation.questions:
        ids = encode(write_request(question))
        if ids[: len(head)] != head:
            raise UsageError(
                f"conversation {conversation.name}: this tokenizer's tokens of the conversation depend on the "
                f"question {question.question!r}, so it cannot be read once for all; use another model"
            )
        asked.append(AskedQuestion(conversation.name, question, head, ids[len(head) :]))
    return asked


def write_request(question: ChatQuestion) -> str:
    """The request for an answer, which follows the conversation."""
    if question.category == ADVERSARIAL:
        a, b = question.choices
        return fill_template(CHOOSE, question=question.question, a=a, b=b)
    return fill_template(REQUEST, question=question.question + (WHEN if question.category == TEMPORAL else ""))


def _common_prefix(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return tuple(token for token, _ in pairs)
