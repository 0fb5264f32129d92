from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from msrnn.evaluation.loss import losses
from msrnn.evaluation.tasks.extrapolation_cases import Case
from msrnn.evaluation.tasks.extrapolation_legs import leg_nll
from tests.helpers.courses import CASES, COURSE, LENGTH, three_texts
from tests.helpers.tiny import build, llama


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama())


@pytest.mark.parametrize("given", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_windows_of_legs_are_those_of_the_whole(model: PreTrainedModel, case: Case, given: int) -> None:
    course, ids = COURSE._replace(given=given), torch.tensor([chunk.ids for chunk in three_texts().chunks])
    rnn = case.rnn(model)
    whole = losses(rnn, ids, rnn.state(3)).double()
    state, found = rnn.state(3), list[list[float]]([[], [], []])
    for leg in course.legs():
        for text, nll in zip(found, leg_nll(rnn, ids, state, course, leg), strict=True):
            text += nll
        assert state.seen.tolist() == [leg[1] - 1] * 3
    for text, row in zip(found, whole, strict=True):
        costs = [0.0] * given + row[given - 1 :].tolist()
        assert text == pytest.approx([sum(costs[i : i + 5]) for i in range(0, LENGTH, 5)], rel=1e-5)
    assert sum(course.counts) == LENGTH - given
    assert course.counts == [5 - given, *[5] * 9, 3]


def test_legs_from_a_start_on() -> None:
    assert [*COURSE.legs()] == [(0, 15), (15, 30), (30, 45), (45, LENGTH)]
    assert [*COURSE.legs(30)] == [(30, 45), (45, LENGTH)]
