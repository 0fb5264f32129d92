from __future__ import annotations

import pytest

from msrnn.errors import UsageError
from msrnn.evaluation.data.problems import GSM8K, MATH, Problem
from msrnn.evaluation.data.reasoning_prompts import AskedProblems, ask_problems, find_end, write_request
from tests.helpers.characters import character_tokenizer

TOKENIZER = character_tokenizer()
SUMS = [Problem(GSM8K, f"{i} + {i}?", str(2 * i)) for i in range(3)]
HALF = Problem(MATH, "Half of {problem}?", r"\frac12")


def decode(asked: AskedProblems) -> str:
    return str(TOKENIZER.decode(asked.ids))


def test_one_problem() -> None:
    (asked,) = ask_problems(TOKENIZER, [HALF], 1, True)
    assert decode(asked).endswith(
        "<user>Half of {problem}?\n\n"
        "Please reason step by step, and put your final answer within \\boxed{}.<end>\n<model>"
    )
    (plain,) = ask_problems(TOKENIZER, [HALF], 1, False)
    assert decode(plain).startswith("<s>Problem:\nHalf of")
    assert decode(plain).endswith("\\boxed{}.\n\nSolution:\n")


def test_several_problems_of_one_dataset() -> None:
    asked = ask_problems(TOKENIZER, [*SUMS, HALF], 2, True)
    assert [one.problems for one in asked] == [tuple(SUMS[:2]), tuple(SUMS[2:]), (HALF,)]
    assert [one.dataset for one in asked] == [GSM8K, GSM8K, MATH]
    request = write_request(SUMS)
    assert "following 3 problems" in request
    assert "Problem 1:\n0 + 0?\n\nProblem 2:\n1 + 1?\n\nProblem 3:\n2 + 2?" in request
    assert 'a line "Answer N: \\boxed{}"' in request


def test_a_key_has_the_prompt_and_what_is_expected() -> None:
    (asked,) = ask_problems(TOKENIZER, SUMS[:1], 1, True)
    others = [
        *ask_problems(TOKENIZER, SUMS[:1], 1, False),
        *ask_problems(TOKENIZER, SUMS[:2], 2, True),
        *ask_problems(TOKENIZER, [SUMS[0]._replace(expected="1")], 1, True),
        *ask_problems(TOKENIZER, [SUMS[0]._replace(dataset=MATH)], 1, True),
    ]
    assert len({asked.key, *(one.key for one in others)}) == 5
    assert ask_problems(TOKENIZER, SUMS, 1, True)[0].key == asked.key


def test_a_tokenizer_without_a_template() -> None:
    bare = character_tokenizer()
    bare.chat_template = None
    with pytest.raises(UsageError, match="no chat template"):
        ask_problems(bare, SUMS, 1, True)


def test_where_a_plain_answer_ends() -> None:
    assert [find_end(count) for count in (1, 2)] == ["\nProblem:", "\nProblem 3"]
