from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msrnn.errors import FileError, UsageError
from msrnn.evaluation.data.problems import GSM8K, MATH, Problem, check_sources, limit_problems, load_problems
from tests.helpers.problem_files import HALVES, SUMS, write_halves, write_lines, write_sums


def test_files_are_told_by_their_fields(tmp_path: Path) -> None:
    found = load_problems([write_sums(tmp_path), write_halves(tmp_path)])
    assert found[0] == Problem(GSM8K, "What is 1 + 1?", "2")
    assert found[-1] == Problem(MATH, "Half of 3?", r"\frac{3}{2}")
    assert [one.dataset for one in found] == [GSM8K] * 3 + [MATH] * 2


def test_a_problem_counts_once(tmp_path: Path) -> None:
    assert len(load_problems([write_sums(tmp_path), write_lines(tmp_path / "b.jsonl", [*SUMS[:1], *HALVES])])) == 5


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "no text in the field 'question'; each line needs 'question' and 'answer'"),
        ({"question": "a"}, "no text in the field 'answer'"),
        ({"question": "a", "answer": 3}, "no text in the field 'answer'"),
        ({"question": " ", "answer": "#### 3"}, "no text in the field 'question'"),
        ({"question": "a", "answer": "18"}, "the answer does not end in a number; end it as GSM8K does"),
        ({"question": "a", "answer": "#### many"}, "the answer does not end in a number"),
        ({"problem": "a", "answer": "1"}, "no text in the field 'solution'"),
        ({"problem": "a", "solution": "b", "answer": ""}, "no text in the field 'answer'"),
        (["a"], "no text in the field 'question'"),
        (7, "no text in the field 'question'"),
    ],
)
def test_other_lines_are_refused(row: Any, message: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "other.jsonl", [*SUMS, row])
    with pytest.raises(FileError) as caught:
        load_problems([path])
    assert f"{path}, line 4: {message}" in str(caught.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"gone\.jsonl: no such file; give \.jsonl files"):
        check_sources([write_sums(tmp_path), tmp_path / "gone.jsonl"])
    with pytest.raises(FileError, match=r"empty.jsonl: has no problem; give lines"):
        load_problems([write_lines(tmp_path / "empty.jsonl", [])])
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"question": "a", ')
    with pytest.raises(UsageError, match=r"broken.jsonl, line 1: not JSON .*; correct the line"):
        load_problems([broken])


def test_a_smaller_choice_begins_a_larger_one() -> None:
    some = [Problem(name, f"{name} {i}", "1") for i in range(9) for name in (MATH, GSM8K)]
    few, more, every = (limit_problems(some, limit) for limit in (2, 5, None))
    assert [one.dataset for one in few] == [GSM8K] * 2 + [MATH] * 2
    assert (few[:2], few[2:]) == (more[:2], more[5:7])
    assert sorted(every) == sorted(some)
    assert limit_problems(some[::-1], 5) == more
