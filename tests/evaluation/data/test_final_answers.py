from __future__ import annotations

from fractions import Fraction

import pytest

from msrnn.evaluation.data.final_answers import (
    extract_answers,
    extract_boxed,
    extract_number,
    find_boxes,
    is_same_number,
    read_number,
)


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"so \boxed{18}.", "18"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right\}}", r"\left\{ x \right\}"),
        (r"\boxed{a \\} tail}", r"a \\"),  # a line break, and the end
        (r"\boxed {7}", "7"),
        (r"\boxed 7", "7"),
        (r"\fbox{-3}", "-3"),
        (r"\boxed{5} and then \boxed{6", "5"),  # cut off at the limit
        (r"\boxed{5}. I put the answer within \boxed{}.", "5"),
        (r"within \boxed{...}", None),
        (r"\boxed{", None),
        ("18", None),
        ("", None),
    ],
)
def test_boxes(text: str, boxed: str | None) -> None:
    assert extract_boxed(text) == boxed


def test_nested_boxes_count_by_the_last_that_begins() -> None:
    assert find_boxes(r"\boxed{x = \boxed{3}}") == [(0, r"x = \boxed{3}"), (11, "3")]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (r"3 + 4, then \boxed{18} is it, or 5", "18"),
        ("It costs 9.\n#### 18", "18"),
        ("#### -1,200.50 and 7 more", "-1200.5"),
        ("#### $18", "18"),
        ("The answer is 18. Then 5.", "18"),
        ("The answer is 3. No, the answer is: **$1,800**. Check 5.", "1800"),
        ("Answer: 42 apples of 50", "42"),
        (r"the answer is \(-4\), not 5", "-4"),
        ("first 3, then 12", "12"),
        ("16-3=13", "13"),
        ("16 - 13", "13"),
        ("16-13", "13"),
        ("it falls to -13 degrees", "-13"),
        ("it falls to \u221213", "-13"),
        ("he owes -$13.00", "-13"),
        ("$-13$", "-13"),
        ("1,2,3", "3"),
        ("12,345,678 stars", "12345678"),
        ("that is 50%", "50"),
        ("3/4 of it", "3/4"),
        (".5 cups", "1/2"),
        ("ends with 18.", "18"),
        ("#### 3 * 6 = 18", "18"),
        ("Answer: 3 - 5 = -2", "-2"),
        ("Answer: 3 - 5 = -2 degrees, not 4", "-2"),
        ("The answer is 2 + 3 = 5. Then 7 = 7.", "5"),
        ("The answer is 5, because 2x = 10", "5"),
        ("The answer is 3-fold", "3"),
        ("Answer: 18 dollars for 3 days", "18"),
        (r"\boxed{18 = 9 \times 2}", "18"),
        (r"\boxed{9 \times 2 = 18}", "18"),
        (r"\boxed{18 \text{ apples for } 3}", "18"),
        (r"\boxed{x = -4}", "-4"),
    ],
)
def test_numbers(text: str, number: str) -> None:
    found = extract_number(text)
    assert found is not None
    assert read_number(found) == Fraction(number)


@pytest.mark.parametrize("text", ["", "none at all", "####", r"\boxed{", "- . ,"])
def test_no_number(text: str) -> None:
    assert extract_number(text) is None


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("18", "18"),
        ("18.00", "18"),
        ("$1,200", "1200"),
        (r"\$1{,}200", "1,200"),
        (r"1\,200", "1200"),
        (r"x = 5\text{ m}^2", "5"),
        (r"2 + 3 = 5", "5"),
        (r"18 \text{ dollars}", "18"),
        (r"\frac{1}{2}", "0.5"),
        (r"-\frac{3}{4}", "-.75"),
        (r"\dfrac12", "0.5"),
        ("50\\%", "50"),
        ("-0", "0"),
        ("007", "7"),
    ],
)
def test_equal_numbers(answer: str, expected: str) -> None:
    assert is_same_number(answer, expected)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("18", "-18"),
        ("-18", "18"),
        ("1.8", "18"),
        ("1200", "12"),
        ("18.01", "18"),
        ("1/0", "1"),
        ("0/0", "0"),
        (r"\text{Ann}", "18"),
        ("", "18"),
        ("9" * 5000, "18"),  # more digits than Python reads
        ("1/" + "9" * 5000, "18"),
        (r"\frac{1}{2}", "12"),
        *((expression, "3") for expression in (r"3 \frac{1}{2}", r"3 \times 6", "3+5", "3 + 5", "3 - 5", "3-5", "3^2")),
        *(
            (expression, "3")
            for expression in ("3!", "3, 4", "3,4,5", "3:30", r"3 \pm 1", r"3 \cdot 2", "3 apples + 2")
        ),
        (r"\sqrt{16}", "16"),
        (r"2\sqrt{3}", "2"),
        ("-(3)", "3"),
    ],
)
def test_other_numbers(answer: str, expected: str) -> None:
    assert not is_same_number(answer, expected)


MARKED = r"""### Problem 1
2 + 2 = 4. First \boxed{3}, no.
Answer 1: \boxed{4}

### Problem 2
Half of 10 is 5.
**Answer 2:** \boxed{5} since 10 / 2 = 5, not 6
Some words about 77."""


def test_several_answers_by_their_marks() -> None:
    assert extract_answers(MARKED, 2, extract_number) == ["4", "5"]
    assert extract_answers(MARKED, 2, extract_boxed) == ["4", "5"]
    assert extract_answers(MARKED, 3, extract_boxed) == ["4", "5", None]
    assert extract_answers("Answer 2: 7\nAnswer 1: $3", 2, extract_number) == ["3", "7"]
    assert extract_answers("Answer to problem 1:\n\n12 apples\n13\nAnswer 2: 1", 2, extract_number) == ["12", "1"]
    assert extract_answers(r"Answer 1: \boxed{1} Answer 1: \boxed{2}", 2, extract_boxed) == ["2", None]


def test_a_marked_box_of_several_lines() -> None:
    matrix = "\\begin{pmatrix} 1 \\\\\n2 \\end{pmatrix}"
    text = f"Answer 1: $\\boxed{{{matrix}}}$\nAnswer 2: none, \\boxed 3"
    assert extract_answers(text, 2, extract_boxed) == [matrix, "3"]


def test_a_mark_without_an_answer_takes_none_from_the_next_problem() -> None:
    text = "Answer 1: I do not know.\nNow the second: 3, \\boxed{8}\nAnswer 2: \\boxed{9}"
    assert extract_answers(text, 2, extract_boxed) == [None, "9"]
    assert extract_answers(text, 2, extract_number) == [None, "9"]


def test_several_answers_below_their_headings() -> None:
    text = "Problem 1: it is 3, so 4\n**Problem 2**\nhence \\boxed{5}\nSolution 3: none"
    assert extract_answers(text, 3, extract_number) == ["4", "5", None]
    assert extract_answers(text, 3, extract_boxed) == [None, "5", None]
    spoken = "To solve Problem 1: so 4.\nSolution to problem 2:\nso 5\nfor question 3, we get 6"
    assert extract_answers(spoken, 3, extract_number) == ["4", "5", "6"]
    again = text + "\nProblem 1: no, it is 6"
    assert extract_answers(again, 3, extract_number) == ["6", "5", None]


def test_several_answers_without_marks_are_in_order_if_none_is_missing() -> None:
    text = r"\boxed{1}, \boxed{2}"
    assert extract_answers(text, 2, extract_boxed) == ["1", "2"]
    assert extract_answers(text, 3, extract_boxed) == [None] * 3
    assert extract_answers(text, 1, extract_boxed) == ["2"]
    assert extract_answers("5 and 6", 2, extract_number) == [None, None]


def test_marks_of_other_problems_do_not_count() -> None:
    assert extract_answers(r"Answer 3: \boxed{1}, Answer 0: \boxed{2}, \boxed{4}", 2, extract_boxed) == [None, None]
