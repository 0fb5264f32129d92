"""A question as the tokens that a model reads: the document's end is cut, so that all of the prompt fits."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy

from msrnn.errors import UsageError
from msrnn.evaluation.prompts import filled
from msrnn.evaluation.speaking import prompted
from msrnn.evaluation.understanding.questions import Question
from msrnn.hf import chat_template as turns


class Prompt(NamedTuple):
    ids: list[int]
    cut: int  # tokens of the document that are missing

    @property
    def key(self) -> str:
        return hashlib.sha256(numpy.array(self.ids, dtype="<i8").tobytes()).hexdigest()[:16]


class Asker:
    """A tokenizer, a template of the task's, and whether the model is asked in its chat template."""

    def __init__(self, tokenizer: Any, template: str, chat: bool) -> None:
        if chat:
            turns.check_template(tokenizer)
        if not tokenizer.is_fast:
            raise UsageError("this model's tokenizer cannot tell where a token ends in a text: take one that is fast")
        self.tokenizer, self.template, self.chat = tokenizer, template, chat
        self._documents: dict[str, list[int]] = {}

    def ask(self, question: Question, length: int, option: str = "--length") -> Prompt:
        """In at most so many tokens. The prompt is one text, tokenized as a whole."""
        ends, alone = self._ends(question.text), len(self._whole("", question.question))
        room = min(length - alone, len(ends))
        while room > 0:
            ids = self._whole(question.text[: ends[room - 1] if room < len(ends) else None], question.question)
            if len(ids) <= length:
                return Prompt(ids, len(ends) - room)
            room -= len(ids) - length
        raise UsageError(f"{option} {length}: question {question.name} alone takes {alone} tokens; take more than that")

    def _whole(self, document: str, question: str) -> list[int]:
        return prompted(self.tokenizer, filled(self.template, document=document, question=question), self.chat)

    def _ends(self, text: str) -> list[int]:
        """Where each token of a document ends in its text; a document comes with several questions."""
        if text not in self._documents:
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            self._documents[text] = [stop for _, stop in encoded["offset_mapping"]]
        return self._documents[text]
