"""Questions on documents, and the answers that people gave; as each published form has them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Row = dict[str, Any]
YES_NO, UNANSWERABLE, EXTRACTIVE, FREE = "yes/no", "unanswerable", "extractive", "free-form"


class Reference(NamedTuple):
    text: str
    kind: str = FREE


class Question(NamedTuple):
    name: str  # of the document, then of the question
    document: str  # its name: questions on one document are not independent
    text: str
    question: str
    references: list[Reference]

    @property
    def key(self) -> str:
        """By its content."""
        return _digest(json.dumps([self.text, self.question, self.references]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Form(NamedTuple):
    """One way to write questions down: the fields that a row must have, and what is made of it and its number."""

    fields: tuple[str, ...]
    read: Callable[[Row, int], Iterator[Question]]

    def fits(self, row: Any) -> bool:
        return isinstance(row, dict) and all(field in row for field in self.fields)


def _squality(row: Row, number: int) -> Iterator[Question]:
    """The original: a story and five questions, each with four answers."""
    name = str((row.get("metadata") or {}).get("passage_id", number))
    for i, asked in enumerate(row["questions"], start=1):
        references = [Reference(response["response_text"]) for response in asked["responses"]]
        numbered = f"{name}/{asked.get('question_number', i)}"
        yield Question(numbered, name, row["document"], asked["question_text"], references)


def _qasper(row: Row, number: int) -> Iterator[Question]:
    """The original, and the hub's, in which lists of records have become records of lists."""
    name = str(row.get("id", number))
    sections = [
        "\n".join([section["section_name"] or "", *section["paragraphs"]]).strip()
        for section in _records(row["full_text"])
    ]
    text = "\n\n".join(part for part in (row.get("title"), row.get("abstract"), *sections) if part)
    for i, asked in enumerate(_records(row["qas"]), start=1):
        given = [_annotated(one["answer"]) for one in _records(asked["answers"])]
        yield Question(f"{name}/{asked.get('question_id', i)}", name, text, asked["question"], given)


def _annotated(answer: Row) -> Reference:
    """What one annotator answered, as the official evaluation reads it."""
    if answer["unanswerable"]:
        return Reference("Unanswerable", UNANSWERABLE)
    if answer["extractive_spans"]:
        return Reference(", ".join(answer["extractive_spans"]), EXTRACTIVE)
    if answer["free_form_answer"]:
        return Reference(answer["free_form_answer"], FREE)
    return Reference("Yes" if answer["yes_no"] else "No", YES_NO)


def _records(either: Any) -> list[Row]:
    if isinstance(either, list):
        return either
    return [dict(zip(either, values, strict=True)) for values in zip(*either.values(), strict=True)]


def _plain(row: Row, number: int) -> Iterator[Question]:
    """A paper as one text, and free-form answers, of which some are missing."""
    for i, asked in enumerate(row["qas"], start=1):
        answer = asked["free_form_answer"]
        name = str(row.get("title", number))
        yield Question(f"{name}/{i}", name, row["text"], asked["question"], [_worded(answer)] if answer else [])


def _leval(row: Row, number: int) -> Iterator[Question]:
    """L-Eval's: one answer to each question."""
    for i, (asked, answer) in enumerate(zip(row["instructions"], row["outputs"], strict=True), start=1):
        yield Question(f"{number}/{i}", _digest(row["input"]), row["input"], asked, [_worded(answer)])


def _scrolls(row: Row, number: int) -> Iterator[Question]:
    """SCROLLS' and ZeroSCROLLS': the whole prompt, and where in it document and question are.

    ZeroSCROLLS keeps its answers back; whoever has them puts them into `output`, one or a list.
    """
    whole, name = row["input"], str(row.get("pid") or row.get("id") or number)
    text = _without(whole[row["document_start_index"] : row["document_end_index"]], "Story:", "Article:")
    asked = _without(whole[row["query_start_index"] : row["query_end_index"]], "Question:").removesuffix("Answer:")
    given = row.get("output")
    answers = given if isinstance(given, list) else [given] if given else []
    yield Question(name, _digest(text), text, asked.strip(), [_worded(answer) for answer in answers])


def _without(text: str, *headers: str) -> str:
    for header in headers:
        text = text.strip().removeprefix(header)
    return text.strip()


def _worded(answer: str) -> Reference:
    """An answer of which nobody said what kind it is."""
    word = answer.strip().strip(".").lower()
    kind = YES_NO if word in ("yes", "no") else UNANSWERABLE if word == UNANSWERABLE else FREE
    return Reference(answer, kind)


SCROLLS = Form(("input", "document_start_index", "query_start_index"), _scrolls)
SQUALITY_FORMS = {"SQuALITY": Form(("document", "questions"), _squality), "SCROLLS": SCROLLS}
QASPER_FORMS = {
    "QASPER": Form(("full_text", "qas"), _qasper),
    "papers as text": Form(("text", "qas"), _plain),
    "L-Eval": Form(("input", "instructions", "outputs"), _leval),
    "SCROLLS": SCROLLS,
}
