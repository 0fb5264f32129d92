from __future__ import annotations

import pytest

from msrnn.evaluation.data.problems import GSM8K, MATH, Problem
from msrnn.evaluation.data.reasoning_prompts import AskedProblems
from msrnn.evaluation.tasks.reasoning import FULL_CASE, Case, Reply
from msrnn.evaluation.tasks.reasoning_report import Report, count_right, count_solved

TOVA, PROTECTED = Case("tova", 8), Case("tova", 8, "prompt")
RECALL = Case("tova + 4 recalled", 8)
ONE, TWO = (Problem(GSM8K, text, "1") for text in ("one", "two"))
HALF = Problem(MATH, "half", "1")
ASKED = [AskedProblems((ONE, TWO), (1,)), AskedProblems((ONE,), (2,)), AskedProblems((HALF,), (3,))]


def reply(*right: bool, tokens: int = 4, ended: bool = True, protected: float = 0.0) -> Reply:
    return Reply(right, tokens, ended, protected)


FULL = [reply(True, True), reply(True, False), reply(True), reply(True), reply(True), reply(False)]
BOUNDED = [reply(True, False), reply(False, False), reply(False), reply(False, tokens=10, ended=False), *FULL[4:]]


@pytest.fixture
def report() -> Report:
    protected = [one._replace(protected=0.5) for one in FULL]
    return Report({FULL_CASE: FULL, TOVA: BOUNDED, PROTECTED: protected, RECALL: BOUNDED}, ASKED, 2)


def test_shares_of_problems(report: Report) -> None:
    assert report.datasets == {GSM8K: 3, MATH: 1}
    assert report.right(FULL_CASE, GSM8K).value == pytest.approx(5 / 6)
    assert report.pass_share(FULL_CASE, GSM8K).value == 1
    assert report.right(TOVA, GSM8K).value == pytest.approx(1 / 6)
    assert report.pass_share(TOVA, GSM8K).value == pytest.approx(1 / 3)
    assert report.right(TOVA, MATH) == (0.5, None, None)
    assert report.tokens(TOVA, GSM8K).value == pytest.approx((4 + 7) / 2)
    assert report.cut(TOVA, GSM8K).value == 0.25
    assert report.share_protected(PROTECTED, MATH).value == 0.5


def test_intervals_are_over_prompts(report: Report) -> None:
    found = report.right(TOVA, GSM8K)
    assert (found.low, found.high) == (0, pytest.approx(0.25))  # the first prompt alone, or the second


def test_differences(report: Report) -> None:
    assert report.pairs == [
        (PROTECTED, TOVA),
        (RECALL, TOVA),
        (TOVA, FULL_CASE),
        (PROTECTED, FULL_CASE),
        (RECALL, FULL_CASE),
    ]
    assert report.difference(PROTECTED, TOVA, GSM8K, count_right).value == pytest.approx(4 / 6)
    assert report.difference(TOVA, FULL_CASE, GSM8K, count_solved).value == pytest.approx(-2 / 3)
    assert report.difference(PROTECTED, FULL_CASE, GSM8K, count_right) == (0, 0, 0)


def test_counts_of_a_prompt() -> None:
    some = [reply(True, False), reply(True, True), reply(False, False)]
    assert (count_right(some), count_solved(some)) == (1, 2)


def test_tables(report: Report) -> None:
    tables = report.tables("a model")
    assert [table.title for table in tables] == [
        "GSM8K, 3 problems: a model",
        "MATH-500, 1 problems",
        "GSM8K, paired differences on the same problems",
        "MATH-500, paired differences on the same problems",
    ]
    assert tables[0].header == ["version", "right", "pass@2", "tokens", "cut", "protected"]
    assert tables[0].strings(" ")[2][0] == "tova 8, prompt protected"
    assert [row[-2:] for row in tables[0].strings(" ")] == [
        ["0.0%", "—"],
        ["25.0%", "—"],
        ["0.0%", "50%"],
        ["25.0%", "—"],
    ]
    assert tables[2].rows[0][0] == "tova 8, prompt protected against tova 8"
    lines = tables[0].csv().splitlines()
    assert len(lines) == 1 + 4 * 2
    assert lines[0].startswith("policy,size,protect,dataset,problems,samples,right,right_low,right_high,pass,")
    assert lines[5].startswith("tova,8,prompt,GSM8K,3,2,0.83")


def test_one_sample_has_no_pass() -> None:
    alone = Report({FULL_CASE: FULL[::2]}, ASKED, 1)
    (first, second) = alone.tables("a model")
    assert first.header == ["version", "right", "tokens", "cut", "protected"]
    page = alone.markdown("a model", {"commit": "abc"})
    assert page.startswith("# Reasoning\n\na model. Right: the share of right final answers. ")
    assert "- commit: abc" in page
    assert second.lines is None
