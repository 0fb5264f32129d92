from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from time import perf_counter

import pytest

from msrnn.errors import UsageError
from msrnn.evaluation.tasks import math_verifier
from msrnn.evaluation.tasks.math_verifier import MathVerifier, check_verifier


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    with MathVerifier() as one:
        yield one


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("0.5", r"\frac12"),
        (r"(3,\pi/2)", r"\left( 3, \frac{\pi}{2} \right)"),
        ("x=5", "5"),
        (r"5\text{ cm}", "5"),
        ("1,000", "1000"),
        ("10080", r"10,\!080"),
        (r"11\sqrt2", r"11\sqrt{2}"),
        ("90", r"90^\circ"),
        ("(a+5)(b+2)", "(b+2)(a+5)"),
        (r"\text{Evelyn}", "Evelyn"),
        ("  p -  q", "p-q"),
        (r"\{3, 1\}", r"\{1,3\}"),
    ],
)
def test_same(answer: str, expected: str, verifier: MathVerifier) -> None:
    assert verifier.is_same(answer, expected)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("7", "8"),
        ("-5", "5"),
        ("6.28", r"2\pi"),
        (r"\text{east}", r"\text{west}"),
        ("(1,2)", "(2,1)"),
        ("}{", "3"),
        ("\0\ud800\n", "3"),
        ("", "3"),
        ("3" * 5000, "3"),
    ],
)
def test_other(answer: str, expected: str, verifier: MathVerifier) -> None:
    assert not verifier.is_same(answer, expected)


def test_nothing_is_evaluated(verifier: MathVerifier, tmp_path: object) -> None:
    path = f"{tmp_path}/evaluated"
    for text in (f"__import__('os').system('touch {path}')", f"\\text{{__import__('os').mkdir('{path}')}}"):
        assert not verifier.is_same(text, "3")
    assert not os.path.exists(path)


def test_a_comparison_that_takes_too_long_is_stopped(verifier: MathVerifier) -> None:
    """Also in a thread, in which signals cannot be used; the next comparison starts another process."""
    found: list[bool] = []

    def compare() -> None:
        with MathVerifier(seconds=0.2) as impatient:
            found.append(impatient.is_same("10^{10^{10^{10}}}", "3"))
            impatient.seconds = 60
            found.append(impatient.is_same("0.5", r"\frac12"))

    thread, began = threading.Thread(target=compare), perf_counter()
    thread.start()
    thread.join(120)
    assert found == [False, True]
    assert perf_counter() - began < 60


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    check_verifier()
    monkeypatch.setattr(math_verifier, "PACKAGES", ("no_such_package",))
    with pytest.raises(UsageError, match=r"pip install 'msrnn\[reasoning\]'"):
        check_verifier()
    with MathVerifier() as one:
        assert one.is_same("3", " 3")  # needs none
        with pytest.raises(UsageError, match="no_such_package"):
            one.is_same("3", "4")


def test_a_process_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with MathVerifier() as one, pytest.raises(UsageError, match="math-verify does not start: python -m msrnn"):
        one.is_same("3", "4")
