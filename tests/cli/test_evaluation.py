from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from msrnn.cli import evaluations
from msrnn.cli.evaluation import Loaded, evaluate_model, stoppable
from msrnn.cli.evaluation_options import EvaluationOptions
from msrnn.evaluation.runner import Progress
from msrnn.evaluation.store import Store
from tests.helpers.command import Run
from tests.helpers.tiny import build, llama

CALLBACKS = [command.callback for command in evaluations.registered_commands if command.callback]
VERBS = [callback.__name__.replace("_", "-") for callback in CALLBACKS]


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


def test_an_evaluation_gets_what_all_share() -> None:
    def run(model: object, *, texts: list[str], progress: Progress, **shared: Any) -> tuple[object, ...]:
        progress.total(0)
        return model, texts, shared

    loaded = Loaded(Store(None), build(llama()), "tokenizer", {"model": "tiny"})
    found = evaluate_model(EvaluationOptions(), loaded, partial(run, texts=["a"]))
    shared = {"tokenizer": "tokenizer", "folder": loaded.store, "about": {"model": "tiny"}, "workers": None}
    assert found == (loaded.model, ["a"], shared)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "run the same command to continue"),
        ({"force": True}, "without --force"),
        ({"kept": False}, "nothing is kept"),
    ],
)
def test_an_interrupted_command_says_how_to_resume(
    arguments: dict[str, bool], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt), stoppable(**arguments):
        raise KeyboardInterrupt
    assert expected in capsys.readouterr().err
