"""Questions and answers of an evaluation as records of a store. Scores need nothing else, and no model."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from pydantic import Field, Strict

from msrnn.core.rope import ORIGINAL
from msrnn.errors import FileError, UsageError
from msrnn.evaluation.cells import FULL, FULL_MODEL, TRUNCATED, UNBOUNDED, Cell, cell_of, find_cells
from msrnn.evaluation.data.prompts import Prompt
from msrnn.evaluation.data.questions import Question, Reference
from msrnn.evaluation.schemas import Schema, Text, check_of
from msrnn.evaluation.store import Record, Store

MARK = "settings_used"  # the field of a record that only records that settings were used again


class SettingsSchema(Schema):
    task: Text
    fingerprint: Text
    dtype: Text
    chat: bool
    length: int
    positions: Text
    answer: int


class PredictionSchema(Schema):
    policy: Text
    numbers: Any
    size: int | None
    positions: Text
    prompt: Text
    prediction: Text
    answer: int


class QuestionSchema(SettingsSchema):
    """A question; `prompts` has, by length, the key of the prompt, its tokens, and the tokens that were cut."""

    question: Text
    name: Text
    document: Text
    references: list[Annotated[list[Text], Field(min_length=1, max_length=2)]]
    prompts: dict[Annotated[str, Field(pattern=r"^\d+$")], Annotated[tuple[Text, Any, Any], Strict(False)]]


_CHECKS = {
    "prediction": check_of(PredictionSchema),
    "references": check_of(QuestionSchema),
    MARK: check_of(SettingsSchema),
}


def check_record(record: Record) -> str | None:
    """Describe the fault of a record: an answer, a question, or a mark."""
    for name, check in _CHECKS.items():
        if name in record:
            return check(record)
    return f"without the field {', '.join(map(repr, _CHECKS))}"


class Settings(NamedTuple):
    """The settings that all answers of a table share."""

    task: str
    fingerprint: str  # of the model's weights
    dtype: str
    chat: bool  # prompts are in the chat template
    length: int  # tokens of a prompt, at most
    positions: str  # of the tokens that a bounded state keeps
    answer: int  # tokens of an answer, at most

    @property
    def answer_key(self) -> Record:
        return {"task": self.task, "fingerprint": self.fingerprint, "dtype": self.dtype, "answer": self.answer}

    def answer_key_of(self, cell: Cell) -> Record:
        """The fields that identify an answer of a cell, together with its prompt."""
        positions = ORIGINAL if cell.policy == FULL else self.positions
        return {**cell.key, **self.answer_key, "positions": positions}

    @property
    def key(self) -> Record:
        return self._asdict()

    @classmethod
    def last(cls, store: Store, task: str, **wanted: Any) -> Settings:
        """The settings that were used last, of those that have these values."""
        used = cls.find_used(store, task)
        if not used:
            raise FileError(f"has no question of {task}", store.path, advice="answer some first")
        matching = [settings for settings in used if wanted.items() <= settings.key.items()]
        if not matching:
            known = "; or ".join(dict.fromkeys(_description(settings.key) for settings in used))
            raise UsageError(f"{_description(wanted)}: no answers like this in {store.path}; use {known}")
        return matching[-1]

    @classmethod
    def find_used(cls, store: Store, task: str) -> list[Settings]:
        """All settings that a store has of a task, oldest first; questions have theirs."""
        records = [record for record in store.matching({"task": task}) if MARK in record or "references" in record]
        return [cls(**{name: record[name] for name in cls._fields}) for record in records]


def _description(key: Record) -> str:
    names = {"length": "length", "positions": "positions", "answer": "max_new_tokens", "chat": "chat"}
    return ", ".join(f"{label}={key[name]}" for name, label in names.items() if name in key)


class StoredQuestion(NamedTuple):
    """A question and its prompts: for each length, the key of the prompt, its tokens, and the tokens that were cut."""

    name: str
    document: str
    references: list[Reference]
    prompts: dict[int, tuple[str, int, int]]


class Answers:
    """The questions and answers that a store has for some settings."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self.store, self.settings = store, settings
        self.questions: dict[str, StoredQuestion] = {}
        for record in store.matching(settings.key):
            if "references" in record:
                self._add_question(record)
        self.records: dict[tuple[str, str, str], Record] = {
            self._place(record): record for record in store.matching(settings.answer_key) if "prediction" in record
        }

    def _add_question(self, record: Record) -> None:
        prompts = {int(length): tuple(entry) for length, entry in record["prompts"].items()}
        if record["question"] in self.questions:
            self.questions[record["question"]].prompts.update(prompts)
        else:
            references = [Reference(*one) for one in record["references"]]
            self.questions[record["question"]] = StoredQuestion(record["name"], record["document"], references, prompts)

    @staticmethod
    def _place(record: Record) -> tuple[str, str, str]:
        return str([record["policy"], record["numbers"], record["size"]]), record["positions"], record["prompt"]

    def store_question(self, question: Question, prompts: dict[int, Prompt]) -> None:
        """Store a question, unless all its prompts are stored already."""
        known = self.questions[question.key].prompts if question.key in self.questions else {}
        entries = {length: (p.key, len(p.ids), p.cut) for length, p in prompts.items()}
        if all(known.get(length) == entry for length, entry in entries.items()):
            return
        record = {
            **self.settings.key,
            "question": question.key,
            "name": question.name,
            "document": question.document,
            "question_text": question.question,
            "references": question.references,
            "prompts": entries,
        }
        self.store.append(record)
        self._add_question(record)

    def mark_used(self) -> None:
        """Mark these settings as the ones used last: questions that are stored already add no record."""
        if Settings.find_used(self.store, self.settings.task)[-1:] != [self.settings]:
            self.store.append({**self.settings.key, MARK: True})

    def source(self, cell: Cell, question: StoredQuestion) -> tuple[Cell, str]:
        """The cell whose answer is used (the full model's if prompt and answer fit the size), and the prompt's key."""
        key, tokens, _ = question.prompts[self.length(cell)]
        fits = cell.keeps is None or tokens + self.settings.answer <= cell.keeps
        return (FULL_MODEL if fits or cell.policy in UNBOUNDED else cell), key

    def length(self, cell: Cell) -> int:
        """Tokens of a cell's prompts, at most."""
        if cell.policy == TRUNCATED and cell.size is not None:
            return min(cell.size, self.settings.length)
        return self.settings.length

    def answer(self, cell: Cell, question: StoredQuestion) -> Record | None:
        """The record of a cell's answer."""
        source, prompt = self.source(cell, question)
        return self.records.get(self._place({**self.settings.answer_key_of(source), "prompt": prompt}))

    def others(self, cells: list[Cell], questions: list[str]) -> list[Cell]:
        """All other cells that have answered these questions."""
        lengths = {length for question in self.questions.values() for length in question.prompts}
        truncated = [Cell(TRUNCATED, length) for length in sorted(lengths - {self.settings.length})]
        rest = [cell for cell in (*find_cells(self.records.values(), cell_of), *truncated) if cell not in cells]
        return [cell for cell in rest if set(questions) <= set(self.find_answered([cell]))]

    def find_answered(self, cells: list[Cell]) -> list[str]:
        """The questions that all these cells have answered, by name."""
        done = [
            key
            for key, question in self.questions.items()
            if all(self.length(cell) in question.prompts and self.answer(cell, question) for cell in cells)
        ]
        return sorted(done, key=lambda key: self.questions[key].name)

    def metadata(self, cell: Cell, question: str) -> Record:
        """The metadata of an answer. Other settings may have computed it, so fields of the settings are left out."""
        record = self.answer(cell, self.questions[question]) or {}
        own = {"prompt", "prediction", "tokens", "answer_tokens", "seconds", *cell.key, *self.settings.key}
        return {name: value for name, value in record.items() if name not in own}
