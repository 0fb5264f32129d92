"""The prompts of the paper, word for word, and the token ids of a question within a given length."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy

from msrnn.errors import UsageError
from msrnn.evaluation.data.questions import Question
from msrnn.hf import chat_template

SQUALITY = """{document}

Answer the question in a paragraph.

Question:

{question}

Answer:"""

QASPER = """{document}

Answer the question as concisely as you can, using a single phrase or sentence if possible. If the question cannot be \
answered based on the information in the article, write "unanswerable". If the question is a yes/no question, answer \
"yes", "no", or "unanswerable".

Question:

{question}

Answer:"""

STORY = """### Instruction:
Write a very long story (at least 4,000 words). The story should include at least 20 named characters, spans 3 \
countries and 9 cities, at least 10 chapters and should have a lot of plot twists.

### Response:"""

JUDGE = """Help me decide which response is better given the prompt:
{prompt}
Which of the following responses is better (the responses are separated by '------------------------'):
Response (A):
{first}
------------------------
Response (B):
{second}
Comparing these two responses, which response is better (A), (B) or (C) for equal quality? please select one and only \
one option, be as concisely as you can, using a single phrase."""


def fill_template(template: str, **parts: str) -> str:
    """The template with each {name} replaced once; what replaces it may have braces."""
    pieces, rest = [], template
    for name in sorted(parts, key=lambda name: template.index(f"{{{name}}}")):
        before, _, rest = rest.partition(f"{{{name}}}")
        pieces += [before, parts[name]]
    return "".join([*pieces, rest])


def prompt_ids(tokenizer: Any, text: str, chat: bool) -> list[int]:
    """The tokens of a prompt: in the model's chat template, or the bare text as the tokenizer begins it."""
    whole = chat_template.opening(tokenizer, text) if chat else text
    return list(tokenizer(whole, add_special_tokens=not chat)["input_ids"])


class Prompt(NamedTuple):
    ids: list[int]
    cut: int  # tokens of the document that are missing

    @property
    def key(self) -> str:
        return hashlib.sha256(numpy.array(self.ids, dtype="<i8").tobytes()).hexdigest()[:16]


class PromptBuilder:
    """Builds the prompts of a task; `chat`: in the model's chat template."""

    def __init__(self, tokenizer: Any, template: str, chat: bool) -> None:
        if chat:
            chat_template.check_template(tokenizer)
        if not tokenizer.is_fast:
            name = type(tokenizer).__name__
            raise UsageError(f"{name}: does not report where tokens end in a text; use a model with a fast tokenizer")
        self.tokenizer, self.template, self.chat = tokenizer, template, chat
        self._documents: dict[str, list[int]] = {}

    def build(self, question: Question, length: int, length_name: str = "length") -> Prompt:
        """A prompt of at most `length` tokens: the end of the document is cut. It is tokenized as one text."""
        ends, alone = self._token_ends(question.text), len(self._ids("", question.question))
        room = min(length - alone, len(ends))
        while room > 0:
            ids = self._ids(question.text[: ends[room - 1] if room < len(ends) else None], question.question)
            if len(ids) <= length:
                return Prompt(ids, len(ends) - room)
            room -= len(ids) - length
        raise UsageError(
            f"{length_name}={length}: question {question.name} alone takes {alone} tokens; use a larger number"
        )

    def _ids(self, document: str, question: str) -> list[int]:
        return prompt_ids(self.tokenizer, fill_template(self.template, document=document, question=question), self.chat)

    def _token_ends(self, text: str) -> list[int]:
        """Where each token of a document ends in its text; kept, since a document has several questions."""
        if text not in self._documents:
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            self._documents[text] = [stop for _, stop in encoded["offset_mapping"]]
        return self._documents[text]
