"""Where questions come from: the hub, or a file whose form is recognised by what its first row has."""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msrnn.errors import UsageError
from msrnn.evaluation.chunks import rank
from msrnn.evaluation.texts import hub_rows, read_file
from msrnn.evaluation.understanding.questions import Form, Question


class Hub(NamedTuple):
    name: str
    more: dict[str, str] = {}  # noqa: RUF012  # arguments of load_dataset


class Found(NamedTuple):
    questions: list[Question]  # by name
    form: str
    offered: int
    without: int  # questions that nobody answered: they cannot be scored, and are left out

    def told(self) -> str:
        documents = len({question.document for question in self.questions})
        return (
            f"{len(self.questions):,} of {self.offered:,} questions on {documents:,} documents, "
            f"in the form of {self.form} (without an answer: {self.without:,})"
        )


def questions(source: Path | None, split: str, hub: Hub, forms: dict[str, Form], limit: int | None, seed: int) -> Found:
    """All that have an answer, or as many as wanted: a seed decides which, and fewer are among those of more.

    One document after the other gives all its questions, since it is read once for all of them.
    """
    rows, where = _rows(source, split, hub), str(source or hub.name)
    form = _form(rows, forms, where)
    found = _merged(one for number, row in enumerate(rows, start=1) for one in _read(form, row, where, number))
    answered = [question for question in found if question.references]
    if not answered:
        raise UsageError(f"{where}: none of its {len(found)} questions has an answer to score by")
    if empty := next((question.name for question in answered if not question.text.strip()), None):
        raise UsageError(f"{where}: the document of question {empty!r} is empty; leave it out")
    name, times = Counter(question.name for question in answered).most_common(1)[0]
    if times > 1:
        raise UsageError(f"{where}: {times} questions are named {name!r}; give each document an id of its own")
    chosen = sorted(answered, key=lambda one: (rank(seed, one.document), rank(seed, one.name)))[:limit]
    named = next(name for name, known in forms.items() if known is form)
    return Found(sorted(chosen), named, len(found), len(found) - len(answered))


def _rows(source: Path | None, split: str, hub: Hub) -> list[Any]:
    if source is None:
        return list(hub_rows(hub.name, split, hub.name, "or give --data a file", **hub.more))
    if not source.is_file():
        raise UsageError(f"{source}: no such file; name a .jsonl or .json file of questions")
    text = read_file(source)
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        return _lines(text, source)
    if isinstance(whole, dict) and whole and all(isinstance(value, dict) for value in whole.values()):
        return [{"id": name, **row} for name, row in whole.items()]  # as QASPER was released
    return whole if isinstance(whole, list) else [whole]


def _lines(text: str, source: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise UsageError(f"{source}, line {number}: not JSON ({error.msg})") from error
    return rows


def _form(rows: Sequence[Any], forms: dict[str, Form], where: str) -> Form:
    if not rows:
        raise UsageError(f"{where}: empty; give questions to answer")
    for form in forms.values():
        if form.fits(rows[0]):
            return form
    known = "; ".join(f"{name}: {', '.join(form.fields)}" for name, form in forms.items())
    raise UsageError(f"{where}: its first row is of no form that is known here, which are told by fields ({known})")


def _read(form: Form, row: Any, where: str, number: int) -> list[Question]:
    try:
        found = list(form.read(row, number))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{where}, row {number}: not as rows of this form are ({reason})") from error
    for question in found:
        _check_words(question, f"{where}, row {number}")
    return found


def _check_words(question: Question, where: str) -> None:
    """JSON has null, or a number, where words are missing."""
    references = [("a reference", reference.text) for reference in question.references]
    for what, value in [("the document", question.text), ("the question", question.question), *references]:
        if not isinstance(value, str):
            told = reprlib.repr(value)
            raise UsageError(f"{where}: {what} of question {question.name!r} is {told}; must be a string")


def _merged(found: Iterable[Question]) -> list[Question]:
    """A question that is repeated, as SCROLLS does for another answer to it and L-Eval for none, is one question."""
    merged: dict[tuple[str, str], Question] = {}
    for one in found:
        first = merged.setdefault((one.text, one.question), one._replace(references=[]))
        first.references.extend(answer for answer in one.references if answer not in first.references)
    return list(merged.values())
