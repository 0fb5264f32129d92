from __future__ import annotations

from typing import Any

import pytest

from msrnn.errors import UsageError
from msrnn.policy import Policy
from msrnn.training.plan import TrainingPlan


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        ({"policy": "tova"}, "policy", "use echo"),
        ({"policy": "full"}, "policy", "use echo"),
        ({"policy": "echo:upper"}, "policy", "has a budget"),
        ({"policy": "echo@weights.safetensors"}, "policy", "has a file already"),
        ({"sizes": ()}, "size", "empty"),
        ({"sizes": (128, 0)}, "size", "must be a whole number"),
        ({"sizes": (1,)}, "size", "nothing to choose"),
        ({"sizes": (2048,)}, "length", "must be 2,304 tokens or more"),
        ({"length": 500}, "length", "must be 512 tokens or more"),
        ({"ahead": 1793}, "length", "must be 3,586 tokens or more"),
        ({"ahead": 0}, "ahead", "1 or more"),
        ({"chunks": 0}, "chunks", "1 or more"),
        ({"held_out": 0}, "held_out", "1 or more"),
        ({"moments": 0}, "moments", "1 or more"),
        ({"hidden": 257}, "hidden", "from 1 to 256"),
        ({"steps": 0}, "steps", "1 or more"),
        ({"rounds": True}, "rounds", "1 or more"),
        ({"seed": -1}, "seed", "must be from 0"),
    ],
)
def test_bad_values(change: dict[str, Any], name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        TrainingPlan(**change)
    assert refused.value.name == name


def test_moments_and_candidates() -> None:
    plan = TrainingPlan(sizes=(130, 128, 128), ahead=64, length=400)
    assert plan.sizes == (128, 130)
    assert plan.moments_of(128) == [128, 192, 256, 320]
    assert plan.moments_of(130) == [192, 256, 320]
    assert max(plan.moments_of(130)) + plan.ahead <= plan.length
    assert plan.count_candidates(128) == 128 - (51 - 1)
    assert TrainingPlan("decay=0.5,value_norm=1,first=3").count_candidates(128) == 125


def test_the_policy_with_a_file() -> None:
    assert TrainingPlan("echo+2").name("w.safetensors") == "echo+2@w.safetensors"
    by_fields = TrainingPlan("decay=0.5,value_norm=1").name("w.safetensors")
    assert Policy.parse(by_fields).weights == "w.safetensors"
