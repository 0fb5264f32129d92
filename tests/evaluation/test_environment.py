from __future__ import annotations

from pathlib import Path

import pytest
import torch

from msrnn.evaluation import environment
from msrnn.hf.rnn import MultiStateRNN
from tests.helpers.tiny import FAMILIES, build


def test_what_stands_beside_a_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = environment.environment()
    assert found["torch"]
    assert found["python"]
    assert "cores" in found["machine"]
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert environment.commit() == ""
    monkeypatch.setattr(environment, "PACKAGES", ("no-such-package",))
    assert environment.environment()["no-such-package"] == ""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_identity_of_a_model_is_that_of_its_states(family: str, dtype: torch.dtype, device: str) -> None:
    """Rows that were stored with a state's fingerprint are found again."""
    model = build(FAMILIES[family](), device).to(dtype)
    found = environment.model_identity(model)
    rnn = MultiStateRNN(model, "full", None)
    assert found["fingerprint"] == rnn.spec.fingerprint["model"]
    assert found["dtype"] == rnn.spec.fingerprint["dtype"]
    assert found["backend"] == environment.backend_names(rnn)
