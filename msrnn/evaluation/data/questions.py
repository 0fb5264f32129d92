"""Questions on documents with reference answers, from the hub or a file, in each published format."""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msrnn.errors import UsageError
from msrnn.evaluation.data.texts import check_datasets, hub_rows, parse_line, rank, read_file

Row = dict[str, Any]
YES_NO, UNANSWERABLE, EXTRACTIVE, FREE = "yes/no", "unanswerable", "extractive", "free-form"


class Reference(NamedTuple):
    text: str
    kind: str = FREE


class Question(NamedTuple):
    name: str  # of the document, then of the question
    document: str  # its name; the bootstrap draws documents, since questions on one are not independent
    text: str
    question: str
    references: list[Reference]

    @property
    def key(self) -> str:
        """A digest of its content."""
        return _digest(json.dumps([self.text, self.question, self.references]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Format(NamedTuple):
    """A file format: the fields that its rows have, and a function from a row and its number to questions."""

    fields: tuple[str, ...]
    read: Callable[[Row, int], Iterator[Question]]

    def matches(self, row: Any) -> bool:
        return isinstance(row, dict) and all(field in row for field in self.fields)


def _squality(row: Row, number: int) -> Iterator[Question]:
    """The original SQuALITY: a story and five questions, each with four answers."""
    name = str((row.get("metadata") or {}).get("passage_id", number))
    for i, entry in enumerate(row["questions"], start=1):
        references = [Reference(response["response_text"]) for response in entry["responses"]]
        numbered = f"{name}/{entry.get('question_number', i)}"
        yield Question(numbered, name, row["document"], entry["question_text"], references)


def _qasper(row: Row, number: int) -> Iterator[Question]:
    """The original QASPER, and the hub's version, in which lists of records became records of lists."""
    name = str(row.get("id", number))
    sections = [
        "\n".join([section["section_name"] or "", *section["paragraphs"]]).strip()
        for section in _records(row["full_text"])
    ]
    text = "\n\n".join(part for part in (row.get("title"), row.get("abstract"), *sections) if part)
    for i, entry in enumerate(_records(row["qas"]), start=1):
        given = [_read_annotation(one["answer"]) for one in _records(entry["answers"])]
        yield Question(f"{name}/{entry.get('question_id', i)}", name, text, entry["question"], given)


def _read_annotation(answer: Row) -> Reference:
    """The answer of one annotator, as the official evaluation reads it."""
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
    """A paper as one text, with free-form answers, some of them missing."""
    for i, entry in enumerate(row["qas"], start=1):
        answer = entry["free_form_answer"]
        name = str(row.get("title", number))
        yield Question(f"{name}/{i}", name, row["text"], entry["question"], [_reference(answer)] if answer else [])


def _leval(row: Row, number: int) -> Iterator[Question]:
    """L-Eval: one answer to each question."""
    for i, (question, answer) in enumerate(zip(row["instructions"], row["outputs"], strict=True), start=1):
        yield Question(f"{number}/{i}", _digest(row["input"]), row["input"], question, [_reference(answer)])


def _scrolls(row: Row, number: int) -> Iterator[Question]:
    """SCROLLS and ZeroSCROLLS: the whole prompt, and where the document and the question are in it.

    ZeroSCROLLS does not publish its answers; the field `output` may have one or a list.
    """
    whole, name = row["input"], str(row.get("pid") or row.get("id") or number)
    text = _without(whole[row["document_start_index"] : row["document_end_index"]], "Story:", "Article:")
    question = _without(whole[row["query_start_index"] : row["query_end_index"]], "Question:").removesuffix("Answer:")
    given = row.get("output")
    answers = given if isinstance(given, list) else [given] if given else []
    yield Question(name, _digest(text), text, question.strip(), [_reference(answer) for answer in answers])


def _without(text: str, *headers: str) -> str:
    for header in headers:
        text = text.strip().removeprefix(header)
    return text.strip()


def _reference(answer: str) -> Reference:
    """A reference whose kind is derived from its words."""
    word = answer.strip().strip(".").lower()
    kind = YES_NO if word in ("yes", "no") else UNANSWERABLE if word == UNANSWERABLE else FREE
    return Reference(answer, kind)


SCROLLS = Format(("input", "document_start_index", "query_start_index"), _scrolls)
SQUALITY_FORMATS = {"SQuALITY": Format(("document", "questions"), _squality), "SCROLLS": SCROLLS}
QASPER_FORMATS = {
    "QASPER": Format(("full_text", "qas"), _qasper),
    "papers as text": Format(("text", "qas"), _plain),
    "L-Eval": Format(("input", "instructions", "outputs"), _leval),
    "SCROLLS": SCROLLS,
}


class Hub(NamedTuple):
    name: str
    more: dict[str, str] = {}  # noqa: RUF012  # arguments of load_dataset


SQUALITY_HUB = Hub("pszemraj/SQuALITY-v1.3")
QASPER_HUB = Hub("allenai/qasper", {"revision": "refs/convert/parquet"})
_OTHER_QUESTIONS = "or give a file of questions"


class QuestionSet(NamedTuple):
    questions: list[Question]  # by name
    format_name: str
    offered: int
    unanswered: int  # without a reference, so that they cannot be scored; left out

    def summary(self) -> str:
        documents = len({question.document for question in self.questions})
        return (
            f"{len(self.questions):,} of {self.offered:,} questions on {documents:,} documents, "
            f"in the format of {self.format_name} (without an answer: {self.unanswered:,})"
        )


def questions(
    source: Path | None, split: str, hub: Hub, formats: dict[str, Format], limit: int | None, seed: int
) -> QuestionSet:
    """The questions of a source that have a reference; at most `limit`, chosen by the seed.

    A smaller choice is part of a larger one. Documents are taken one by one with all their questions, since a document
    is read once for all of them.
    """
    rows, where = _rows(source, split, hub), str(source or hub.name)
    form = _format(rows, formats, where)
    merged = _merge(one for number, row in enumerate(rows, start=1) for one in _read(form, row, where, number))
    answered = [question for question in merged if question.references]
    if not answered:
        raise UsageError(f"{where}: none of its {len(merged)} questions has a reference answer; add reference answers")
    if empty := next((question.name for question in answered if not question.text.strip()), None):
        raise UsageError(f"{where}: the document of question {empty!r} is empty; leave it out")
    name, times = Counter(question.name for question in answered).most_common(1)[0]
    if times > 1:
        raise UsageError(f"{where}: {times} questions are named {name!r}; give each document its own id")
    chosen = sorted(answered, key=lambda one: (rank(seed, one.document), rank(seed, one.name)))[:limit]
    format_name = next(name for name, known in formats.items() if known is form)
    return QuestionSet(sorted(chosen), format_name, len(merged), len(merged) - len(answered))


def check_source(source: Path | None, hub: Hub) -> None:
    """Refuse a file that does not exist, before anything is loaded; without a file, a missing package."""
    if source is None:
        check_datasets(hub.name, _OTHER_QUESTIONS)
    elif not source.is_file():
        raise UsageError(f"{source}: no such file; give a .jsonl or .json file of questions")


def _rows(source: Path | None, split: str, hub: Hub) -> list[Any]:
    check_source(source, hub)
    if source is None:
        return list(hub_rows(hub.name, split, hub.name, _OTHER_QUESTIONS, **hub.more))
    text = read_file(source)
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return _lines(text, source)
    if isinstance(whole, dict) and whole and all(isinstance(value, dict) for value in whole.values()):
        return [{"id": name, **row} for name, row in whole.items()]  # as QASPER was released
    return whole if isinstance(whole, list) else [whole]


def _lines(text: str, source: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        rows.append(parse_line(line, f"{source}, line {number}"))
    return rows


def _format(rows: Sequence[Any], formats: dict[str, Format], where: str) -> Format:
    if not rows:
        raise UsageError(f"{where}: empty; give questions to answer")
    for form in formats.values():
        if form.matches(rows[0]):
            return form
    known = "; ".join(f"{name}: {', '.join(form.fields)}" for name, form in formats.items())
    raise UsageError(f"{where}: the fields of its first row match no known format; use one of these ({known})")


def _read(form: Format, row: Any, where: str, number: int) -> list[Question]:
    try:
        parsed = list(form.read(row, number))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{where}, row {number}: not a row of this format ({reason}); correct the row") from error
    for question in parsed:
        _check_words(question, f"{where}, row {number}")
    return parsed


def _check_words(question: Question, where: str) -> None:
    """Refuse null or a number where a text is expected."""
    references = [("a reference", reference.text) for reference in question.references]
    for what, value in [("the document", question.text), ("the question", question.question), *references]:
        if not isinstance(value, str):
            raise UsageError(
                f"{where}: {what} of question {question.name!r} is {reprlib.repr(value)}; must be a string"
            )


def _merge(questions: Iterable[Question]) -> list[Question]:
    """Merge repeated questions: SCROLLS repeats a question for each of its answers, L-Eval for no reason."""
    merged: dict[tuple[str, str], Question] = {}
    for one in questions:
        first = merged.setdefault((one.text, one.question), one._replace(references=[]))
        first.references.extend(answer for answer in one.references if answer not in first.references)
    return list(merged.values())
