"""Prompts of retrieval tasks: what is hidden is in the text, at its depth, and the question asks for it."""

from __future__ import annotations

import json

import pytest

from msrnn.errors import UsageError
from msrnn.evaluation.data.needles import FIRST, LAST, PLACES, TASKS, Asked, Haystack, Sample, score
from msrnn.hf.loading import Loaded
from tests.helpers.characters import character_tokenizer

TEXT = " ".join(f"This is sentence {i} of a text about nothing." for i in range(300))


@pytest.fixture(scope="module")
def haystack(small: Loaded) -> Haystack:
    return Haystack(small.tokenizer, TEXT, chat=True)


def words(asked: Asked, haystack: Haystack) -> str:
    return str(haystack.tokenizer.decode(asked.prompt.ids))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("task", TASKS)
def test_prompts(task: str, place: str, haystack: Haystack) -> None:
    for depth in (0.0, 0.5, 1.0):
        asked = haystack.ask(Sample(task, 1000, depth, 0), place)
        assert 800 < len(asked.prompt.ids) <= 1000
        text = words(asked, haystack)
        for answer in asked.answers:
            assert answer in text
        first = asked.answers[0]
        at = text.index(f" = {score_value(text)}.") if task == "variables" else text.index(first)
        assert abs(at / len(text) - depth) < 0.25
        assert haystack.ask(Sample(task, 1000, depth, 0), place) == asked
        assert haystack.ask(Sample(task, 1000, depth, 1), place).answers != asked.answers


def score_value(text: str) -> str:
    """The number that the chain of variables begins with."""
    return text.split("assigned the value ")[1].split(" ")[0]


def test_the_question_is_first_or_last_and_the_facts_are_the_same(haystack: Haystack) -> None:
    sample = Sample("keys", 600, 0.25, 3)
    first, last = (haystack.ask(sample, place) for place in (FIRST, LAST))
    assert first.answers == last.answers
    texts = [words(asked, haystack) for asked in (first, last)]
    places = [text.index("What is the special magic value") / len(text) for text in texts]
    assert places[0] < 0.3
    assert places[1] > 0.9
    assert all(text.count("One of the special magic values") == 4 for text in texts)
    assert haystack.ask(sample._replace(number=4), LAST).prompt.key != last.prompt.key


def test_several_values_and_variables(haystack: Haystack) -> None:
    assert len(haystack.ask(Sample("values", 600, 0.5, 0), LAST).answers) == 4
    chain = haystack.ask(Sample("variables", 600, 0.0, 0), LAST)
    text = words(chain, haystack)
    places = [text.index(f"VAR {name} = ") for name in chain.answers]
    assert places == sorted(places)
    for before, after in zip(chain.answers, chain.answers[1:], strict=False):
        assert f"VAR {after} = VAR {before}." in text


def test_json_is_json(haystack: Haystack) -> None:
    asked = haystack.ask(Sample("json", 900, 1.0, 0), LAST)
    text = words(asked, haystack)
    found = json.loads(text[text.index("{") : text.index("}") + 1])
    assert asked.answers == [[*found.values()][-1]]
    assert f'"{[*found][-1]}" in the JSON object' in text


def test_without_a_chat_template_the_answer_has_begun() -> None:
    asked = Haystack(character_tokenizer(), TEXT, chat=False).ask(Sample("number", 900, 0.5, 0), LAST)
    text = character_tokenizer().decode(asked.prompt.ids)
    assert text.endswith("mentioned in the text is")
    assert len(asked.prompt.ids) <= 900


def test_a_text_that_is_too_short_is_repeated(small: Loaded) -> None:
    asked = Haystack(small.tokenizer, "One sentence. Another one.", chat=False).ask(Sample("word", 500, 0.5, 0), LAST)
    assert len(asked.prompt.ids) > 480


def test_what_cannot_be_made(small: Loaded, haystack: Haystack) -> None:
    with pytest.raises(UsageError, match="fewer than two sentences"):
        Haystack(small.tokenizer, "Only one", chat=False).ask(Sample("word", 500, 0.5, 0), LAST)
    for task in ("values", "json"):
        with pytest.raises(UsageError, match=f"length=40: a question of task {task} alone takes"):
            haystack.ask(Sample(task, 40, 0.5, 0), LAST)


def test_scores() -> None:
    assert score("The value is 1234567.", ["1234567"]) == 1
    assert score("It is AMBER-Anchor", ["amber-anchor"]) == 1
    assert score("1, 2 and 4", ["1", "2", "3", "4"]) == 0.75
    assert score("", ["1"]) == 0


@pytest.mark.parametrize("task", TASKS)
def test_a_whole_sentence_fits_the_limit_of_an_answer(task: str, haystack: Haystack) -> None:
    """Models repeat the question's key before they answer."""
    for number in range(5):
        asked = haystack.ask(Sample(task, 600, 0.5, number), LAST)
        question = words(asked, haystack).rsplit("?", 1)[0].split("\n")[-1].removeprefix("What is ")
        sentence = f"{question} is: {', '.join(asked.answers)}."
        assert len(haystack.tokenizer(sentence)["input_ids"]) < TASKS[task].tokens, sentence
