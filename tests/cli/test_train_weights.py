"""`msrnn train-weights`: a file of row weights that other commands use."""

from __future__ import annotations

import csv
import inspect
import string
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from msrnn.cli.train_weights import SIZES, train_weights
from msrnn.core.weights_file import read_training
from msrnn.training import fit
from msrnn.training.plan import TrainingPlan
from tests.helpers.command import Run

SHORT = (
    "--device",
    "cpu",
    "--ahead",
    64,
    "--length",
    160,
    "--size",
    24,
    "--chunks",
    4,
    "--held-out",
    1,
    "--moments",
    2,
)
TINY = ("train-weights", *SHORT, "--steps", 6, "--hidden", 2)


@pytest.fixture
def long_texts(tmp_path: Path) -> list[Path]:
    """Two kinds of text: a folder, and a file."""
    folder, file = tmp_path / "letters", tmp_path / "digits.txt"
    folder.mkdir()
    for name in ("one", "two", "three"):
        (folder / f"{name}.txt").write_text((name + string.ascii_letters) * 6)
    file.write_text("".join(str(i * i) for i in range(200)))
    return [folder, file]


def test_weights_are_trained_and_used(run: Run, long_texts: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "weights.safetensors"
    texts = [word for path in long_texts for word in ("--text", path)]
    code, shown, err = run(*TINY, *texts, "--steps", 80, "--out", out)
    assert code == 0, err
    assert "letters, 24" in shown
    assert "digits.txt, 24" in shown
    assert f"use it as --policy echo@{out}" in err
    assert not out.with_name("weights.safetensors.work").exists()
    training = read_training(out)
    assert training["texts"] == {"letters": 2, "digits.txt": 2}
    assert training["steps"] == 80
    assert {"torch", "python", "machine"} <= training.keys()

    words = ("eval", "perplexity", "--device", "cpu", "--length", 65, "--text", long_texts[0], "--size", 16)
    code, _, err = run(*words, "--policy", "echo", "--policy", f"echo@{out}", "--against", "echo", "--out", tmp_path)
    assert code == 0, err
    assert len({line["nll"] for line in csv.DictReader((tmp_path / "perplexity.csv").open())}) == 2

    assert "add --force to replace it" in run(*TINY, *texts, "--out", out).err
    assert run(*TINY, *texts, "--out", out, "--force").code == 0


def test_ctrl_c_and_the_same_command_again(
    run: Run, long_texts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "weights.safetensors"
    words: tuple[Any, ...] = (*TINY, "--text", long_texts[0], "--out", out)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(fit, "compute_loss", stop)
        code, _, err = run(*words)
    assert code == 130
    assert "stopped; run the same command to continue" in err
    assert not out.exists()
    refused = run(*words, "--seed", 1)
    assert "the unfinished work of another training" in refused.err
    code, _, err = run(*words)
    assert code == 0, err
    assert "continuing the work in" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--policy", "tova"), "--policy tova: does not rank by the norm of values"),
        (("--policy", "echo:upper"), "--policy echo:upper: has a budget"),
        (("--size", 1), "--size 1: the policy protects all rows but one"),
        (("--length", 100), "--length 100: must be 128 tokens or more"),
        (("--chunks", 0), "--chunks 0: must be a whole number of chunks, 1 or more"),
        (("--hidden", 1000), "--hidden 1000: must be a whole number of numbers, from 1 to 256"),
        (("--held-out", 0), "--held-out 0: must be"),
        (("--out", "weights.bin"), "--out weights.bin: must end with .safetensors"),
        (("--text", "nowhere"), "nowhere: no such file or folder"),
        (("--chunks", 500), "are needed, which are 80,160 tokens; give more text"),
    ],
)
def test_bad_options(words: tuple[object, ...], message: str, run: Run, long_texts: list[Path], tmp_path: Path) -> None:
    text = () if "--text" in words else ("--text", long_texts[0])
    out = () if "--out" in words else ("--out", tmp_path / "weights.safetensors")
    done = run(*TINY, *text, *out, *words)
    assert done.code == 2
    assert message in done.err
    assert not (tmp_path / "weights.safetensors.work").exists()


def test_two_kinds_of_one_name_are_refused(run: Run, long_texts: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "more" / "letters"
    other.mkdir(parents=True)
    (other / "text.txt").write_text("text")
    done = run(*TINY, "--text", long_texts[0], "--text", other, "--out", tmp_path / "weights.safetensors")
    assert done.code == 2
    assert "--text: two have the same name; rename one" in done.err


def test_defaults_are_those_of_the_plan() -> None:
    """They stand twice, since the command's help does not load torch."""
    given = {name: one.default for name, one in inspect.signature(train_weights).parameters.items()}
    plan = asdict(TrainingPlan())
    assert plan.pop("sizes") == SIZES
    assert {name: given[name] for name in plan} == plan
