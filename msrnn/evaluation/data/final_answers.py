"""The final answer in a solution: where it is written, and whether it is the expected number.

As usual for these datasets: the last \\boxed{} counts; of a number also "#### 18", "the answer is 18", or else the last
number of the text. If several problems are solved in one text, each answer is marked by the number of its problem.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

Extract = Callable[[str], str | None]  # the final answer of a solution; None: there is none
MOST_DIGITS = 300  # of a number; no answer has more, and Python refuses to read thousands

_NUMBER = re.compile(
    r"(?:(?<![\w.)\]}%])(?P<sign>[-\u2212])(?=\S))?(?:\\?\$\s?(?P<inner>[-\u2212])?)?"
    r"(?=\.?\d)(?P<whole>\d{1,3}(?:,\d{3})+(?!,?\d)|\d+)?(?P<part>\.\d+)?(?P<over>\s?/\s?\d+)?"
)
_PLAIN = r"[-\u2212]?\\?\$?[-\u2212]?(?:\d|\.\d)[\d,.]*(?:\s?/\s?\d+)?"
_GOES_ON = r"(?=(?P<rest>[^\n]*))"
_HASHES = re.compile(rf"####\s*(?P<number>{_PLAIN}){_GOES_ON}")
_SAID = re.compile(rf"answer(?:\s+is|\s*:)[\s:*$\\(\[]*(?P<number>{_PLAIN}){_GOES_ON}", re.IGNORECASE)
_OPERATOR = r"(?:[+*\u00d7\u00f7]|\\(?:times|cdot|div|pm|ast)\b)"
_COMPUTES = re.compile(
    rf"\s*(?:{_OPERATOR}|[-\u2212/^!=])\s*[-\u2212$\\(]*\d"
)  # after a number: it is part of an expression
_CLAUSE = re.compile(r".*?(?=[,;.]?\s+[A-Za-z]|[,;]\s|\.\s*$|$)")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")
_SPACES = re.compile(r"\\[,!;: ]|\{,\}|~")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_MARK = re.compile(r"answer\s*(?:(?:to|of)\s+(?:problem|question)\s*)?#?\s*(\d{1,6})\s*\**\s*:", re.IGNORECASE)
_HEADING = re.compile(
    r"^[\s#*>]*(?:(?:to\s+solve|for|(?:solution|answer)\s+(?:to|of|for))\s+)?(?:problem|question|solution)\s*#?\s*(\d{1,6})\b",
    re.IGNORECASE | re.MULTILINE,
)


def find_boxes(text: str) -> list[tuple[int, str]]:
    """Where each \\boxed{} begins, and what is in it. Braces must balance; an empty box is none."""
    boxes = []
    for found in _BOX.finditer(text):
        inside = _read_box(text, found.end())
        if inside is not None and inside.strip(" .$") and inside.strip() != r"\dots":
            boxes.append((found.start(), inside.strip()))
    return boxes


def _read_box(text: str, start: int) -> str | None:
    """What is in the braces that open here; without braces, the next word, as in \\boxed 5; None: they do not close."""
    if text[start : start + 1] != "{":
        word = re.match(r"[-\w.]+", text[start:])
        return word[0] if word else None
    depth, escaped = 0, False
    for end in range(start, len(text)):
        if not escaped:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
        escaped = text[end] == "\\" and not escaped
        if depth == 0:
            return text[start + 1 : end]
    return None


def extract_boxed(text: str) -> str | None:
    """The content of the last \\boxed{} of a solution."""
    boxes = find_boxes(text)
    return boxes[-1][1] if boxes else None


def extract_number(text: str) -> str | None:
    """The final number of a solution, as it is written; a box without a number is an answer, too."""
    boxed = extract_boxed(text)
    if boxed is not None:
        return boxed
    for form in (_HASHES, _SAID):
        said = list(form.finditer(text))
        if said:
            number, rest = said[-1]["number"], said[-1]["rest"]
            clause = _CLAUSE.match(rest)
            return number + clause[0] if clause and _COMPUTES.match(rest) else number
    numbers = _find_numbers(text)
    return numbers[-1] if numbers else None


def read_number(text: str) -> Fraction | None:
    """The number of a short text, without units: the last side of '=' that is a number and not an expression.

    None: there is none, as in "3 * 6". Of several numbers with words between, the first one counts.
    """
    plain = _make_plain(text)
    for side in reversed(plain.split("=")):
        found = [one for one in _NUMBER.finditer(side) if one["whole"] or one["part"]]
        if found and not _is_expression(side, found):
            return _parse(_write(found[0]))
    return None


def _is_expression(side: str, numbers: Sequence[re.Match[str]]) -> bool:
    """Whether the first number is only a part of what a side says: of a sum, a root, a mixed fraction, a list."""
    begin, end = numbers[0].span()
    between = side[end : numbers[1].start()] if len(numbers) > 1 else side[end:]
    words = _COMMAND.sub(" ", re.sub(r"\\(?:text|mathrm|textbf)\b", "", between))
    return bool(
        re.search(r"\\sqrt|\u221a|[-\u2212]\s*\($", side[:begin])
        or re.match(r"\s*[!^]", between)
        or re.search(_OPERATOR, between)
        or (len(numbers) > 1 and not re.search(r"[^\W\d_]", words))
    )


def is_same_number(answer: str, expected: str) -> bool:
    """Whether two numbers are equal: "$1,200.00" and "1200" are."""
    found = read_number(answer)
    return found is not None and found == read_number(expected)


def _find_numbers(text: str) -> list[str]:
    return [_write(one) for one in _NUMBER.finditer(_make_plain(text)) if one["whole"] or one["part"]]


def _make_plain(text: str) -> str:
    """A text without LaTeX's spaces, and with its fractions as "1/2"."""
    return _FRACTION.sub(lambda found: "/".join(part for part in found.groups() if part), _SPACES.sub(_join, text))


def _write(number: re.Match[str]) -> str:
    sign = "-" if number["sign"] or number["inner"] else ""
    return sign + (number["whole"] or "0") + (number["part"] or "") + (number["over"] or "")


def _join(found: re.Match[str]) -> str:
    return "," if found[0] == "{,}" else "" if found[0] in (r"\,", r"\!") else " "


def _parse(number: str) -> Fraction | None:
    above, _, below = number.replace(",", "").replace(" ", "").partition("/")
    if len(number) > MOST_DIGITS or (below and not int(below)):
        return None
    return Fraction(above) / (int(below) if below else 1)


def extract_answers(text: str, count: int, extract: Extract) -> list[str | None]:
    """The final answers of `count` problems that one text solves; of one problem, the whole text is its solution.

    The last "Answer N:" counts; without one, the last part of the text under the heading "Problem N". A text with
    neither has its answers in order, if it has as many boxes as problems.
    """
    if count == 1:
        return [extract(text)]
    marks, headings = ([one for one in form.finditer(text) if 1 <= int(one[1]) <= count] for form in (_MARK, _HEADING))
    boxes = find_boxes(text)
    if not marks and not headings:
        return [inside for _, inside in boxes] if len(boxes) == count else [None] * count
    answers: list[str | None] = [None] * count
    for number, part in _cut_parts(text, headings, headings):
        answers[number] = extract(part)
    for number, part in _cut_parts(text, marks, [*marks, *headings]):
        answers[number] = _extract_marked(part, extract)
    return answers


def _cut_parts(text: str, marks: Sequence[re.Match[str]], ends: Sequence[re.Match[str]]) -> Iterator[tuple[int, str]]:
    """For each mark, the index of its problem, and the text up to where the next part begins."""
    starts = [end.start() for end in ends]
    for mark in marks:
        yield int(mark[1]) - 1, text[mark.end() : min((at for at in starts if at >= mark.end()), default=len(text))]


def _extract_marked(part: str, extract: Extract) -> str | None:
    """The answer that follows a mark: in its line or, if that is empty, in the next; a box may have several lines."""
    line = part.lstrip().partition("\n")[0]
    begin = part.find(line)
    boxes = [inside for start, inside in find_boxes(part) if begin <= start < begin + len(line)]
    return boxes[0] if boxes else extract(line)
