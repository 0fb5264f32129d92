"""`msrnn budget`: the cost of each layer by size, and a file that other commands take as a budget."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from pathlib import Path

import pytest

from msrnn.evaluation.tasks.perplexity import Reader
from tests.helpers.command import Run

TINY = ("budget", "--device", "cpu", "--length", 33, "--size", 8, "--size", 16, "--mean", 12, "--policy", "tova")


def test_a_budget_is_measured_and_used(run: Run, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    code, shown, err = run(*TINY, "--text", texts, "--out", out)
    assert code == 0, err
    assert "rows of each layer, by mean size" in shown
    kinds = ("csv", "json", "jsonl", "md", "png", "svg")
    assert sorted(path.name for path in out.iterdir()) == [f"budget.{kind}" for kind in kinds]
    made = json.loads((out / "budget.json").read_text())
    assert made["sizes"] == [8, 16]
    lines = list(csv.DictReader((out / "budget.csv").open()))
    costs = {(int(line["layer"]), int(line["size"])): float(line["nats"]) for line in lines}
    assert costs == {(i, size): made["losses"][i][j] for i in range(2) for j, size in enumerate((8, 16))}
    assert len(set(costs.values())) == 4
    # Each cost is that of bounding one layer alone.
    rows = [json.loads(line) for line in (out / "budget.jsonl").read_text().splitlines()]
    total: dict[tuple[int | None, int | None], float] = defaultdict(float)
    for row in rows:
        total[row["layer"], row["size"]] += sum(row["nll"])
    tokens = sum(row["tokens"] * len(row["nll"]) for row in rows if row["layer"] is None)
    for cell, nats in costs.items():
        assert nats == pytest.approx((total[cell] - total[None, None]) / tokens)

    # Nothing is read again; the file is a budget of other commands, whose rows it identifies.
    with monkeypatch.context() as patched:
        patched.setattr(Reader, "nll", lambda *_: pytest.fail("read again"))
        assert run(*TINY, "--text", texts, "--out", out).code == 0
    words = ("eval", "perplexity", "--device", "cpu", "--length", 33, "--text", texts, "--size", 12)
    policies = ("--policy", "tova", "--policy", f"tova:{out / 'budget.json'}", "--policy", "tova:upper")
    code, _, err = run(*words, *policies, "--out", tmp_path / "used")
    assert code == 0, err
    found = list(csv.DictReader((tmp_path / "used" / "perplexity.csv").open()))
    assert len({line["nll"] for line in found}) == 3


def test_a_mean_of_the_whole_length_is_not_the_full_model(run: Run, texts: Path, tmp_path: Path) -> None:
    """Under a budget some layers evict even then."""
    words = ("eval", "perplexity", "--device", "cpu", "--length", 33, "--text", texts, "--size", 33)
    policies = ("--policy", "tova", "--policy", "tova:pyramid", "--policy", "full")
    assert run(*words, *policies, "--out", tmp_path).code == 0
    lines = {line["policy"]: line["nll"] for line in csv.DictReader((tmp_path / "perplexity.csv").open())}
    assert lines["tova"] == lines["full"] != lines["tova:pyramid"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--policy", "full"), "--policy full: evicts nothing"),
        (("--policy", "tova:upper"), "--policy tova:upper: has a budget already"),
        (("--size", "8"), "must be two sizes or more"),
        (("--size", "8", "--size", "40"), "smaller than the 33 tokens"),
        (("--size", "8", "--size", "16", "--mean", "20"), "--mean 20: must be from 8 to 16"),
    ],
)
def test_bad_options(words: tuple[str, ...], message: str, run: Run, texts: Path, tmp_path: Path) -> None:
    done = run("budget", "--length", 33, "--mean", 12, *words, "--text", texts, "--out", tmp_path)
    assert done.code == 2
    assert message in done.err


@pytest.mark.parametrize("verb", [("explore", "-"), ("analyze", "--length", 64), ("eval", "story")])
def test_where_layers_must_have_one_size(verb: tuple[object, ...], run: Run, tmp_path: Path) -> None:
    done = run(*verb, "--policy", "tova:upper", "--size", 8, "--out", tmp_path / "out", stdin="a" * 99)
    assert done.code == 2
    assert "leave out :upper" in done.err
