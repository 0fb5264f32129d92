"""Conversations that last months, and questions about them, in the JSON format of LoCoMo.

LoCoMo: Maharana et al., "Evaluating Very Long-Term Conversational Memory of LLM Agents" (ACL 2024, arXiv:2402.17753).
The numbers of its categories are in no table of the paper. They follow from the authors' evaluation code
(https://github.com/snap-research/locomo, `task_eval/evaluation.py`): only category 1 is
scored by parts, and only category 5 by "not mentioned".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, Field, ValidationError

from msrnn.errors import UsageError
from msrnn.evaluation.data.texts import rank, read_file

MULTI_HOP, TEMPORAL, OPEN_DOMAIN, SINGLE_HOP, ADVERSARIAL = range(1, 6)
CATEGORIES = {
    MULTI_HOP: "multi-hop",
    TEMPORAL: "temporal",
    OPEN_DOMAIN: "open-domain",
    SINGLE_HOP: "single-hop",
    ADVERSARIAL: "adversarial",
}
NOT_MENTIONED = "Not mentioned in the conversation"
SEED = 0  # of the questions that a limit chooses


class TurnFormat(BaseModel):
    speaker: str
    text: str = ""
    blip_caption: str | None = None  # the caption of a picture that was shared


class QuestionFormat(BaseModel):
    question: str
    answer: str | int | float | None = None
    adversarial_answer: str | None = None
    category: Literal[1, 2, 3, 4, 5]
    evidence: list[Any] = Field(default_factory=list)


class SampleFormat(BaseModel):
    """One conversation of a file. `session_1`, `session_2`, … are turns, `session_1_date_time` is a date."""

    sample_id: str | int | None = None
    conversation: dict[str, Any]
    qa: list[QuestionFormat]


class ChatQuestion(NamedTuple):
    """A question about a conversation. An adversarial one is about what was not said, and offers two choices."""

    question: str
    category: int
    expected: str
    choices: tuple[str, ...] = ()  # (a) and (b)
    evidence: tuple[str, ...] = ()  # the ids of turns


class Conversation(NamedTuple):
    name: str
    text: str  # all sessions with their dates
    questions: tuple[ChatQuestion, ...]


def check_source(path: Path) -> None:
    """Refuse a file that does not exist, before anything is loaded."""
    if not path.is_file():
        raise UsageError(f"{path}: no such file; give a .json file in the format of LoCoMo")


def load_conversations(path: Path) -> list[Conversation]:
    """The conversations of a file: a list of them, or one alone."""
    check_source(path)
    try:
        whole = json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON ({getattr(error, 'msg', error)}); give a file of LoCoMo") from error
    samples = whole if isinstance(whole, list) else [whole]
    conversations = [_conversation(sample, number, str(path)) for number, sample in enumerate(samples, start=1)]
    if not any(conversation.questions for conversation in conversations):
        raise UsageError(f"{path}: has no question; give a file whose conversations have some")
    names = [conversation.name for conversation in conversations]
    if len(set(names)) < len(names):
        raise UsageError(f"{path}: conversations with the same sample_id; give each its own")
    return conversations


def limit_questions(conversations: Sequence[Conversation], limit: int | None) -> list[Conversation]:
    """At most `limit` questions. Conversations are taken one by one, since each is read once for all its questions.

    A smaller choice is part of a larger one.
    """
    every = [(one.name, question) for one in conversations for question in one.questions]
    order = {name: rank(SEED, name) for name, _ in every}
    chosen = sorted(every, key=lambda one: (order[one[0]], rank(SEED, f"{one[0]}/{one[1].question}")))[:limit]
    wanted = set(chosen)
    kept = [
        one._replace(questions=tuple(question for question in one.questions if (one.name, question) in wanted))
        for one in conversations
    ]
    return [one for one in kept if one.questions]


def _conversation(sample: Any, number: int, path: str) -> Conversation:
    where = f"{path}, conversation {number}"
    read = _parse(SampleFormat, sample, where)
    name = str(number if read.sample_id is None else read.sample_id)
    questions = tuple(_question(entry, where) for entry in read.qa)
    return Conversation(name, _write_sessions(read.conversation, where), questions)


def _question(entry: QuestionFormat, where: str) -> ChatQuestion:
    evidence = tuple(map(str, entry.evidence))
    if entry.answer is None and (entry.category != ADVERSARIAL or entry.adversarial_answer is None):
        raise UsageError(f"{where}: the question {entry.question!r} has no answer; add it, or leave the question out")
    if entry.category != ADVERSARIAL:
        return ChatQuestion(entry.question, entry.category, str(entry.answer), evidence=evidence)
    # Earlier versions of the data have the wrong answer as the answer.
    wrong = str(entry.answer) if entry.adversarial_answer is None else entry.adversarial_answer
    choices = (NOT_MENTIONED, wrong) if rank(SEED, entry.question)[0] % 2 else (wrong, NOT_MENTIONED)
    return ChatQuestion(entry.question, entry.category, NOT_MENTIONED, choices, evidence)


def _write_sessions(entries: dict[str, Any], where: str) -> str:
    """All sessions in their order, each below its date. Pictures are their captions, as in the paper."""
    numbers = sorted(int(name.removeprefix("session_")) for name in entries if name[len("session_") :].isdecimal())
    parts = []
    for number in numbers:
        name = f"session_{number}"
        turns = [_parse(TurnFormat, turn, f"{where}, {name}") for turn in entries[name] or ()]
        if not turns:
            continue
        date = entries.get(f"{name}_date_time")
        if not isinstance(date, str):
            raise UsageError(f"{where}: {name} has no {name}_date_time; add its date")
        parts.append("\n".join([f"DATE: {date}", "CONVERSATION:", *map(_write_turn, turns)]))
    if not parts:
        raise UsageError(f"{where}: has no turns; it needs session_1 and session_1_date_time")
    return "\n\n".join(parts)


def _write_turn(turn: TurnFormat) -> str:
    shared = f" [shares {turn.blip_caption}]" if turn.blip_caption else ""
    return f'{turn.speaker} said, "{turn.text}"{shared}'


M = TypeVar("M", bound=BaseModel)


def _parse(kind: type[M], value: Any, where: str) -> M:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(
            f"{where}: not in the format of LoCoMo, {f'its field {place}: ' if place else ''}{first['msg']}; correct it"
        ) from error
