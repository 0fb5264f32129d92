"""An examination as rows of a store: questions with their prompts, and answers. Scores are made of nothing else."""

from __future__ import annotations

from typing import Any, NamedTuple

from msrnn.core.rope import ORIGINAL
from msrnn.errors import UsageError
from msrnn.evaluation.cells import TRUNCATED, UNBOUNDED, Cell, stored_cells
from msrnn.evaluation.rows import anything, fields, listed, optional, text, truth, whole
from msrnn.evaluation.store import Row, Store
from msrnn.evaluation.understanding.asking import Prompt
from msrnn.evaluation.understanding.questions import Question, Reference
from msrnn.policy import FULL


def _reference(value: Any) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= 2 and all(map(text, value))


def _prompts(value: Any) -> bool:
    """By length: the prompt's key, its tokens, and those cut."""
    if not isinstance(value, dict):
        return False
    whole_rows = (isinstance(told, list) and len(told) == 3 and text(told[0]) for told in value.values())
    return all(name.isdecimal() for name in value) and all(whole_rows)


SAT = "sat"  # in a row that has an exam's key and nothing else
_EXAM = {"task": text, "fingerprint": text, "dtype": text, "chat": truth, "length": whole, "positions": text}
_CHECKS = {
    "prediction": fields(
        policy=text, numbers=anything, size=optional(whole), positions=text, prompt=text, prediction=text, answer=whole
    ),
    "references": fields(
        **_EXAM, answer=whole, question=text, name=text, document=text, references=listed(_reference), prompts=_prompts
    ),
    SAT: fields(**_EXAM, answer=whole),
}


def check_row(row: Row) -> str | None:
    """Whether a row is a question, an answer or a mark that an exam was sat, and has all that it must."""
    for name, check in _CHECKS.items():
        if name in row:
            return check(row)
    return f"without the field {', '.join(map(repr, _CHECKS))}"


class Exam(NamedTuple):
    """What all answers of a table share."""

    task: str
    fingerprint: str  # of the model's weights
    dtype: str
    chat: bool
    length: int  # tokens that a prompt may have
    positions: str  # where the tokens that a bounded state keeps stand
    answer: int  # tokens that an answer may have

    @property
    def answer_key(self) -> Row:
        return {"task": self.task, "fingerprint": self.fingerprint, "dtype": self.dtype, "answer": self.answer}

    @property
    def key(self) -> Row:
        return self._asdict()

    @classmethod
    def last(cls, store: Store, task: str, **wanted: Any) -> Exam:
        """The one that was last sat, of those that have these values."""
        sat = cls.sat(store, task)
        if not sat:
            raise UsageError(f"{store.path}: no question of {task} in it; answer some first")
        fitting = [exam for exam in sat if wanted.items() <= exam.key.items()]
        if not fitting:
            there = ", or ".join(dict.fromkeys(_options(exam.key) for exam in sat))
            raise UsageError(f"{_options(wanted)}: no exam like this in {store.path}; there is {there}")
        return fitting[-1]

    @classmethod
    def sat(cls, store: Store, task: str) -> list[Exam]:
        """All that a store has of a task, one after the other; who writes a question down sits its exam."""
        rows = [row for row in store.matching({"task": task}) if SAT in row or "references" in row]
        return [cls(**{name: row[name] for name in cls._fields}) for row in rows]


def _options(key: Row) -> str:
    """What of an exam is chosen by an option, as it is given."""
    named = {"length": "--length", "positions": "--positions", "answer": "--max-new-tokens"}
    words = [f"{option} {key[name]}" for name, option in named.items() if name in key]
    return " ".join([*words, "--chat" if key["chat"] else "--no-chat"] if "chat" in key else words)


class Asked(NamedTuple):
    """A question as it was put to the model: for each length, the prompt's key, its tokens, and those cut."""

    name: str
    document: str
    references: list[Reference]
    prompts: dict[int, tuple[str, int, int]]


class Records:
    """What a store has of one exam."""

    def __init__(self, store: Store, exam: Exam) -> None:
        self.store, self.exam = store, exam
        self.asked: dict[str, Asked] = {}
        for row in store.matching(exam.key):
            if "references" in row:
                self._take(row)
        self.answers: dict[tuple[str, str, str], Row] = {
            self._place(row): row for row in store.matching(exam.answer_key) if "prediction" in row
        }
        self._done = {self._place(row) for row in store.done(exam.answer_key) if "prediction" in row}

    def _take(self, row: Row) -> None:
        prompts = {int(length): tuple(told) for length, told in row["prompts"].items()}
        if row["question"] in self.asked:
            self.asked[row["question"]].prompts.update(prompts)
        else:
            references = [Reference(*one) for one in row["references"]]
            self.asked[row["question"]] = Asked(row["name"], row["document"], references, prompts)

    @staticmethod
    def _place(row: Row) -> tuple[str, str, str]:
        return str([row["policy"], row["numbers"], row["size"]]), row["positions"], row["prompt"]

    def ask(self, question: Question, prompts: dict[int, Prompt]) -> None:
        """Written down where a prompt is new."""
        known = self.asked[question.key].prompts if question.key in self.asked else {}
        told = {length: (p.key, len(p.ids), p.cut) for length, p in prompts.items()}
        if all(known.get(length) == one for length, one in told.items()):
            return
        row = {
            **self.exam.key,
            "question": question.key,
            "name": question.name,
            "document": question.document,
            "asked": question.question,
            "references": question.references,
            "prompts": told,
        }
        self.store.append(row)
        self._take(row)

    def sit(self) -> None:
        """Written down where another exam was the last: questions that are known leave no row."""
        if Exam.sat(self.store, self.exam.task)[-1:] != [self.exam]:
            self.store.append({**self.exam.key, SAT: True})

    def who(self, cell: Cell, asked: Asked) -> tuple[Cell, str]:
        """Who answers in a cell, and to which prompt. Where all fits the size, that is the unbounded model."""
        length = self.length(cell)
        key, tokens, _ = asked.prompts[length]
        fits = cell.size is None or tokens + self.exam.answer <= cell.size
        return (Cell(FULL, None) if fits or cell.policy in UNBOUNDED else cell), key

    def length(self, cell: Cell) -> int:
        """Tokens that a cell's prompts may have."""
        if cell.policy == TRUNCATED and cell.size is not None:
            return min(cell.size, self.exam.length)
        return self.exam.length

    def answer(self, who: Cell, prompt: str) -> Row | None:
        return self.answers.get(self._place({**self.key(who), "prompt": prompt}))

    def done(self, who: Cell, prompt: str) -> bool:
        """Whether this need not be answered again."""
        return self._place({**self.key(who), "prompt": prompt}) in self._done

    def others(self, cells: list[Cell], questions: list[str]) -> list[Cell]:
        """All other cells of the store that have answered these questions."""
        lengths = {length for asked in self.asked.values() for length in asked.prompts} - {self.exam.length}
        stored = stored_cells(row for row in self.answers.values())
        candidates = [*stored, *(Cell(TRUNCATED, length) for length in sorted(lengths))]
        rest = [cell for cell in candidates if cell not in cells]
        return [cell for cell in rest if set(questions) <= set(self.complete([cell]))]

    def complete(self, cells: list[Cell]) -> list[str]:
        """The questions that all cells have answered, by name."""
        done = [
            key
            for key, asked in self.asked.items()
            if all(self.length(cell) in asked.prompts and self.answer(*self.who(cell, asked)) for cell in cells)
        ]
        return sorted(done, key=lambda key: self.asked[key].name)

    def told(self, cell: Cell, question: str) -> Row:
        """What stands beside an answer, but for what the exam says: it may have been computed in another one."""
        row = self.answer(*self.who(cell, self.asked[question])) or {}
        own = {"prompt", "prediction", "tokens", "said", "seconds", *cell.key, *self.exam.key}
        return {name: value for name, value in row.items() if name not in own}

    def key(self, who: Cell) -> Row:
        """What an answer depends on, beside the prompt."""
        positions = ORIGINAL if who.policy == FULL else self.exam.positions
        return {**who.key, **self.exam.answer_key, "positions": positions}

    def add(self, who: Cell, prompt: str, found: dict[str, Any]) -> None:
        row = {**self.key(who), "prompt": prompt, **found}
        self.store.append(row)
        self.answers[self._place(row)] = row
        self._done.add(self._place(row))
