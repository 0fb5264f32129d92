from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.helpers.command import Run

FAR = ("eval", "extrapolation", "--device", "cpu", "--size", 8, "--tokens", 60, "--window", 10, "--leg", 20)


def test_extrapolation_writes_tables_and_a_figure(run: Run, texts: Path, tmp_path: Path) -> None:
    words = (*FAR, "--text", texts, "--out", tmp_path / "out")
    code, out, err = run(*words)
    assert code == 0
    assert "2 of 2 chunks of 60 tokens, from 2 of 3 texts" in err
    assert all(name in out for name in ("tova@compressed:lnln", "window+4@compact", "tova@original", "10", "60"))
    made = {path.name: path for path in (tmp_path / "out").iterdir()}
    assert sorted(made) == [f"extrapolation.{kind}" for kind in ("csv", "jsonl", "md", "png", "svg")]
    lines = list(csv.DictReader(made["extrapolation.csv"].read_text().splitlines()))
    assert len(lines) == 4 * 6
    assert {line["texts"] for line in lines} == {"2"}
    rows = [json.loads(line) for line in made["extrapolation.jsonl"].read_text().splitlines()]
    assert [(row["start"], row["stop"]) for row in rows] == [(0, 20), (20, 40), (40, 60)] * 8

    again = run(*words)
    assert (again.code, again.out) == (0, out)
    assert "nothing left to compute" in again.err


@pytest.mark.parametrize("lacking", ["nll", "start"])
def test_an_extrapolation_without_its_value_is_named(lacking: str, run: Run, texts: Path, tmp_path: Path) -> None:
    words, path = (*FAR, "--text", texts, "--out", tmp_path / "out"), tmp_path / "out" / "extrapolation.jsonl"
    assert run(*words).code == 0
    lines = path.read_text().splitlines()
    row = json.loads(lines[2])
    del row[lacking]
    lines[2] = json.dumps(row)
    path.write_text("\n".join([*lines, ""]))
    code, out, err = run(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{path}, line 3: damaged, without the field {lacking!r}" in err


FAR_BAD = {
    "leg": (["--leg", "15", "--window", "10"], "--leg 15: must be a multiple of the window, 10, such as 20"),
    "tokens": (["--tokens", "1"], "--tokens 1: must be a whole number, 2 or more"),
    "row": (["--row", "tova@far"], "positions='far'"),
    "batch": (["--batch", "0"], "--batch 0"),
    "many": (["--batch", str(10**12)], f"--batch {10**12}"),
}


def test_more_tokens_than_any_text_has(run: Run, texts: Path, tmp_path: Path) -> None:
    words = ("eval", "extrapolation", "--text", texts, "--out", tmp_path / "out", "--device", "cpu")
    code, _, err = run(*words, "--tokens", 500_000, "--size", 8)
    assert code == 2
    assert err.endswith("500000: the longest text has 71 tokens; use a smaller number\n")


@pytest.mark.usefixtures("undrawn")
def test_extrapolations_of_other_sizes_are_shown_with_theirs(run: Run, texts: Path, tmp_path: Path) -> None:
    words = (*FAR, "--text", texts, "--out", tmp_path / "out", "--row", "tova@original", "--books", 1)
    first = run(*words)
    assert first.code == 0, first.err
    code, _, err = run(*words, "--size", 12)
    assert code == 0
    assert "the tables also show tova@original 8, from earlier commands" in err
    text = (tmp_path / "out" / "extrapolation.md").read_text()
    assert "| tova@original 8 |" in text
    assert "| tova@original 12 |" in text
    path = tmp_path / "out" / "extrapolation.jsonl"
    before = path.read_text()
    again = run(*words, "--force")
    assert again.code == 0
    assert path.read_text().startswith(before)
    assert len(path.read_text().splitlines()) == len(before.splitlines()) + 3


@pytest.mark.parametrize("name", FAR_BAD)
def test_bad_values_of_extrapolation(name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.hf.loading.AutoModelForCausalLM", None)  # refused before the slow part
    words, told = FAR_BAD[name]
    code, out, err = run("eval", "extrapolation", "--text", tmp_path, "--out", tmp_path / "out", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err
    assert list(tmp_path.iterdir()) == []
