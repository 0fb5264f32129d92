from __future__ import annotations

from types import SimpleNamespace

import pytest

from msrnn.cli import evaluations
from msrnn.cli.evaluation import check_positions
from tests.helpers.command import Run

VERBS = [command.callback.__name__ for command in evaluations.registered_commands if command.callback]


@pytest.mark.parametrize("verb", VERBS)
def test_help_ends_with_examples(verb: str, run: Run) -> None:
    code, out, _ = run("eval", verb, "--help", small=True)
    assert code == 0
    examples = [line.strip() for line in out[out.index("Examples:") :].splitlines()[1:] if line.strip()]
    assert examples
    assert all("msrnn eval" in line or line.startswith("--") for line in examples)


def test_verbs_are_listed(run: Run) -> None:
    assert "eval" in run("--help", small=True).out
    assert all(verb in run("eval", "--help", small=True).out for verb in VERBS)


def test_chunks_longer_than_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    check_positions(SimpleNamespace(max_position_embeddings=64), 64)
    check_positions(SimpleNamespace(), 65)
    assert capsys.readouterr().err == ""
    check_positions(SimpleNamespace(max_position_embeddings=64, rope_parameters={"rope_theta": 1e4}), 65)
    assert "more than the 64" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--length 65: this model has 64 positions"):
        check_positions(SimpleNamespace(max_position_embeddings=64), 65)
