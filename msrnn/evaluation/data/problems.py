"""Problems with a known final answer: GSM8K and MATH-500, as .jsonl files.

GSM8K: Cobbe et al., "Training Verifiers to Solve Math Word Problems" (arXiv:2110.14168). MATH: Hendrycks et al.,
"Measuring Mathematical Problem Solving With the MATH Dataset" (arXiv:2103.03874); MATH-500 are 500 of its problems,
chosen by Lightman et al. (arXiv:2305.20050).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msrnn.errors import FileError
from msrnn.evaluation.data.final_answers import read_number
from msrnn.evaluation.data.texts import parse_line, rank, read_file

GSM8K, MATH = "GSM8K", "MATH-500"
SEED = 0  # of the problems that a limit chooses
_FORMATS = "'question' and 'answer' (GSM8K), or 'problem', 'solution' and 'answer' (MATH-500)"
_MARK = "####"  # before the final answer of GSM8K


class Problem(NamedTuple):
    dataset: str  # GSM8K: the answer is a number; MATH-500: it is LaTeX
    text: str
    expected: str


def check_sources(paths: Sequence[Path]) -> None:
    """Refuse files that do not exist, before anything is loaded."""
    for path in paths:
        if not path.is_file():
            raise FileError("no such file", path, advice="give .jsonl files of GSM8K or MATH-500")


def load_problems(paths: Sequence[Path]) -> list[Problem]:
    """The problems of files, each once."""
    check_sources(paths)
    return list(dict.fromkeys(problem for path in paths for problem in _read_lines(path)))


def limit_problems(problems: Sequence[Problem], limit: int | None) -> list[Problem]:
    """At most `limit` problems of each dataset, in a random order. A smaller choice begins a larger one."""
    ordered = sorted(problems, key=lambda one: rank(SEED, one.text))
    return [one for name in (GSM8K, MATH) for one in [own for own in ordered if own.dataset == name][:limit]]


def _read_lines(path: Path) -> list[Problem]:
    places = ((f"{path}, line {number}", line) for number, line in enumerate(read_file(path).split("\n"), start=1))
    problems = [_read_problem(parse_line(line, where), where) for where, line in places if line.strip()]
    if not problems:
        raise FileError("has no problem", path, advice=f"give lines with the fields {_FORMATS}")
    return problems


def _read_problem(row: Any, where: str) -> Problem:
    fields = row if isinstance(row, dict) else {}
    names = ("problem", "solution", "answer") if "problem" in fields else ("question", "answer")
    missing = [name for name in names if not isinstance(fields.get(name), str) or not fields[name].strip()]
    if missing:
        raise FileError(f"no text in the field {missing[0]!r}", where, advice=f"each line needs {_FORMATS}")
    if "problem" in fields:
        return Problem(MATH, fields["problem"].strip(), fields["answer"].strip())
    _, mark, final = fields["answer"].rpartition(_MARK)
    if not mark or read_number(final) is None:
        raise FileError("the answer does not end in a number", where, advice=f"end it as GSM8K does, in '{_MARK} 18'")
    return Problem(GSM8K, fields["question"].strip(), final.strip())
