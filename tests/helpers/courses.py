"""A small extrapolation: cases, a course and texts."""

from __future__ import annotations

from msrnn.evaluation.data.texts import Chunk, Data
from msrnn.evaluation.tasks.extrapolation_cases import cases
from msrnn.evaluation.tasks.extrapolation_legs import Course
from tests.helpers.tiny import tokens

LENGTH, SIZE = 53, 8
COURSE = Course(LENGTH, given=1, window=5, leg=15)
CASES = cases(["tova@compressed", "window+4@compact", "tova@original"], SIZE)


def three_texts() -> Data:
    made = [Chunk(f"book {i}", 0, row) for i, row in enumerate(tokens(3, LENGTH).tolist())]
    return Data(made, [], LENGTH, 3, 0, 3, 0)
