from __future__ import annotations

import pytest

from msrnn.cli.evaluation_options import EvaluationOptions
from msrnn.errors import UsageError
from msrnn.hf.model_options import SMALL


def test_the_model_has_a_name() -> None:
    assert (EvaluationOptions().model_name, EvaluationOptions(model="mine").model_name) == (SMALL, "mine")
    assert EvaluationOptions().workers is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (EvaluationOptions(device="abacus"), "abacus"),
        (EvaluationOptions(dtype="int3"), "int3"),
        (EvaluationOptions(cpus=2), "cpus"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(options: EvaluationOptions, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        options.check()


def test_a_cluster_and_processes_that_share_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.cli.evaluation_options.is_torchrun", lambda: True)
    with pytest.raises(UsageError, match=r"--ray: .*torchrun"):
        EvaluationOptions(ray="auto").check()
