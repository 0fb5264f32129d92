"""Synthetic retrieval tasks after RULER: facts (needles) hidden in a text (the haystack), and a question about them.

Everything follows from the haystack's text and a seed; nothing is downloaded.
"""

from __future__ import annotations

import json
import random
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from msrnn.errors import UsageError
from msrnn.evaluation.data.prompts import Prompt, fill_template, prompt_ids

FIRST, LAST = "first", "last"  # where the question is: before the haystack, or after it
PLACES = (FIRST, LAST)
_WORDS = """
amber anchor apple arrow autumn badge banjo basket beacon birch blanket bottle branch bridge bronze butter cabin
candle canyon carpet castle cedar chapel cherry circle cloud clover cobalt comet copper coral cotton cradle cricket
crystal dagger daisy desert dragon eagle ember engine falcon feather fiddle forest fountain garden ginger glacier
granite hammer harbor hazel helmet hollow honey island ivory jacket jasmine jungle kettle ladder lantern lemon lily
magnet maple marble meadow mirror needle nickel oasis ocean olive orchid otter oyster paddle parrot pebble pepper
pigeon pillow pine planet plum pocket prairie quartz rabbit raven ribbon river robin rocket saddle saffron sailor
salmon sandal shadow shovel silver sparrow spider spruce stable summit sunset temple thistle thunder ticket tiger
timber tulip tunnel turtle valley velvet violet walnut whistle willow window winter wizard
"""
WORDS = _WORDS.split()


class Hidden(NamedTuple):
    """The facts that a task hides, and its question."""

    needles: list[str]  # the first is at the depth of the sample, unless the text is its own haystack
    question: str
    answers: list[str]  # all of them count, each in equal parts
    lead: str  # how the answer begins, for a model without a chat template


Hide = Callable[[random.Random], Hidden]


def _number(draw: random.Random) -> str:
    return str(draw.randrange(1_000_000, 10_000_000))


def _word(draw: random.Random) -> str:
    return "-".join(draw.sample(WORDS, 2))


def _uuid(draw: random.Random) -> str:
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def _needle(key: str, value: str) -> str:
    return f"One of the special magic values for {key} is: {value}."


def _ask(key: str, values: Sequence[str]) -> Hidden:
    several = "are all the special magic values" if len(values) > 1 else "is the special magic value"
    verb = "are" if len(values) > 1 else "is"
    question = f"What {several} for {key} mentioned in the text?"
    lead = f"The special magic value{'s' if len(values) > 1 else ''} for {key} mentioned in the text {verb}"
    return Hidden([_needle(key, value) for value in values], question, list(values), lead)


def single(value: Callable[[random.Random], str]) -> Hide:
    return lambda draw: _ask(_word(draw), [value(draw)])


def several_keys(draw: random.Random, others: int = 3) -> Hidden:
    """One needle is asked for, and others are like it."""
    keys = {_word(draw): None for _ in range(4 * others)}
    asked, *rest = [*keys][: others + 1]
    hidden = _ask(asked, [_number(draw)])
    return hidden._replace(needles=[*hidden.needles, *(_needle(key, _number(draw)) for key in rest)])


def several_values(draw: random.Random, count: int = 4) -> Hidden:
    return _ask(_word(draw), [_number(draw) for _ in range(count)])


def variables(draw: random.Random, hops: int = 4) -> Hidden:
    """A chain of assignments, in the order of the text; which variables have the value?"""
    names = draw.sample([a + b + c for a in "ABCDEFGH" for b in "JKLMNPQR" for c in "STUVWXYZ"], hops + 1)
    value = str(draw.randrange(10_000, 100_000))
    chain = [f"VAR {names[0]} = {value}.", *(f"VAR {b} = VAR {a}." for a, b in pairwise(names))]
    question = f"Find all variables that are assigned the value {value} in the text, directly or through another one."
    return Hidden(chain, question, names, f"The variables that are assigned the value {value} are")


class Task(NamedTuple):
    name: str
    hide: Hide | None  # None: the haystack is a JSON object, whose values are asked for
    tokens: int  # of an answer, at most
    ordered: bool = False  # needles follow each other in the text


TASKS = {
    task.name: task
    for task in (
        Task("number", single(_number), 48),
        Task("word", single(_word), 48),
        Task("uuid", single(_uuid), 96),
        Task("keys", several_keys, 48),
        Task("values", several_values, 96),
        Task("json", None, 128),
        Task("variables", variables, 64, ordered=True),
    )
}
TEMPLATES = {
    LAST: "Special facts are hidden in the following text. Remember them: you will be asked about them afterwards.\n\n"
    "{text}\n\n{question}",
    FIRST: "A question about the following text: {question}\n\n{text}\n\nAnswer the question.",
}
JSON_QUESTION = 'What is the value of the key "{key}" in the JSON object?'


class Sample(NamedTuple):
    """One question, by what it is made from."""

    task: str
    length: int  # tokens of the prompt, at most
    depth: float  # where the (first) needle is: 0 is the beginning of the haystack, 1 its end
    number: int


class Asked(NamedTuple):
    """A sample as a prompt, and the answers that count."""

    sample: Sample
    place: str  # of the question
    prompt: Prompt
    answers: list[str]


def score(answer: str, expected: Sequence[str]) -> float:
    """The share of the expected answers that occur, as RULER scores; case does not matter."""
    said = answer.lower()
    return sum(one.lower() in said for one in expected) / len(expected)


@dataclass(frozen=True)
class Haystack:
    """Makes prompts from a text. Without `chat`, the answer's first words are in the prompt."""

    tokenizer: Any
    text: str
    chat: bool
    seed: int = 0

    @cached_property
    def _sentences(self) -> list[str]:
        found = [" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+", self.text)]
        sentences = [part for part in found if part]
        if len(sentences) < 2:
            raise UsageError("the haystack has fewer than two sentences; give a longer text")
        return sentences

    @cached_property
    def _costs(self) -> list[int]:
        return [len(ids) for ids in self.tokenizer(self._sentences, add_special_tokens=False)["input_ids"]]

    @cached_property
    def _around_json(self) -> int:
        """Tokens of such a prompt without its JSON object."""
        key = str(uuid.UUID(int=0))
        return len(
            self._ids(
                "", Hidden([], fill_template(JSON_QUESTION, key=key), [], f'The value of the key "{key}" is'), LAST
            )
        )

    def ask(self, sample: Sample, place: str) -> Asked:
        """The prompt of a sample, of at most its length; the same facts with the question in either place."""
        draw = random.Random(f"{self.seed} {sample.task} {sample.length} {sample.depth} {sample.number}")
        task = TASKS[sample.task]
        make = self._json if task.hide is None else self._text
        most = sample.length
        while True:
            state = draw.getstate()
            text, hidden, used = make(task, sample, draw, most)
            ids = self._ids(text, hidden, place)
            if len(ids) <= sample.length:
                return Asked(sample, place, Prompt(ids, 0), hidden.answers)
            if not used:
                raise UsageError(
                    f"a question of task {sample.task} alone takes {len(ids)} tokens",
                    name="length",
                    value=sample.length,
                    advice="use more",
                )
            most -= max(1, len(ids) - sample.length)
            draw.setstate(state)

    def _ids(self, text: str, hidden: Hidden, place: str) -> list[int]:
        words = fill_template(TEMPLATES[place], text=text, question=hidden.question)
        return prompt_ids(self.tokenizer, words if self.chat else f"{words}\n\n{hidden.lead}", self.chat)

    def _text(self, task: Task, sample: Sample, draw: random.Random, most: int) -> tuple[str, Hidden, int]:
        """Sentences of the text, about `most` tokens, with the needles among them; and how many sentences."""
        assert task.hide is not None
        hidden = task.hide(draw)
        room = most - len(self._ids(" ".join(hidden.needles), hidden, LAST))
        first, count = draw.randrange(len(self._sentences)), 0
        picked: list[str] = []
        while True:
            at = (first + count) % len(self._sentences)  # a text that is too short is repeated
            room -= self._costs[at]
            if room < 0:
                break
            picked.append(self._sentences[at])
            count += 1
        return " ".join(_insert_needles(picked, hidden.needles, sample.depth, task.ordered, draw)), hidden, count

    def _json(self, _: Task, sample: Sample, draw: random.Random, most: int) -> tuple[str, Hidden, int]:
        """A JSON object with as many pairs of UUIDs as fit; the one at the depth is asked for."""
        one = len(self.tokenizer(f'  "{_uuid(draw)}": "{_uuid(draw)}",\n', add_special_tokens=False)["input_ids"])
        count = max(1, (most - self._around_json) // one)
        pairs = [(_uuid(draw), _uuid(draw)) for _ in range(count)]
        key, value = pairs[round(sample.depth * (count - 1))]
        question = fill_template(JSON_QUESTION, key=key)
        lead = f'The value of the key "{key}" is'
        return json.dumps(dict(pairs), indent=1), Hidden([], question, [value], lead), count - 1


def _insert_needles(
    sentences: list[str], needles: list[str], depth: float, ordered: bool, draw: random.Random
) -> list[str]:
    """The first needle at the depth, the others at random places: after it in their order, or anywhere."""
    start = round(depth * len(sentences))
    others = [draw.randint(start if ordered else 0, len(sentences)) for _ in needles[1:]]
    places = [start, *(sorted(others) if ordered else others)]
    found = list(sentences)
    # From the end, so that earlier places stay where they are; of two at one place, the later needle is put first.
    for place, _, needle in sorted(
        ((place, i, needle) for i, (place, needle) in enumerate(zip(places, needles, strict=True))), reverse=True
    ):
        found.insert(place, needle)
    return found
