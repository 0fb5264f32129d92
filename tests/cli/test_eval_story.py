from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.command import Run


def test_stories(run: Run, tmp_path: Path) -> None:
    words = ("eval", "story", "--stories", 3, "--size", 200, "--size", 4000, "--max-new-tokens", 60, "--batch", 2)
    code, out, err = run(*words, "--out", tmp_path / "out", "--device", "cpu")
    assert code == 0, err
    assert "tova 200" in out
    assert "tova 4000" not in out, "a size with room for everything is the full model"
    rows = [json.loads(line) for line in (tmp_path / "out" / "story.jsonl").read_text().splitlines()]
    found = [(row["policy"], row["seed"]) for row in rows]
    assert sorted(found) == [(name, i) for name in ("full", "tova") for i in range(3)], "as they finish"
    assert [name for name, _ in found] == ["full"] * 3 + ["tova"] * 3
    assert all(row["chat"] and row["model"] for row in rows)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["story.csv", "story.jsonl", "story.md"]
    again = run(*words, "--out", tmp_path / "out", "--device", "cpu")
    assert (again.out, "nothing left to compute" in again.err) == (out, True)
    assert "6 of 6 stories already done" in again.err


def test_a_folder_keeps_its_stories_and_shows_them_all(run: Run, tmp_path: Path) -> None:
    words = ("eval", "story", "--stories", 2, "--max-new-tokens", 30, "--out", tmp_path, "--device", "cpu")
    assert run(*words, "--size", 200).code == 0
    before = (tmp_path / "story.jsonl").read_text()
    code, out, err = run(*words, "--size", 190, "--force")
    assert (code, "the tables also show tova 200, from earlier commands" in err) == (0, True)
    assert "tova 190" in out
    assert "tova 200" in out
    after = (tmp_path / "story.jsonl").read_text()
    assert after.startswith(before)
    added = [json.loads(line) for line in after[len(before) :].splitlines()]
    assert {(row["policy"], row["size"]) for row in added} == {("full", None), ("tova", 190)}


BAD = {
    "stories": (["--stories", "0"], "--stories 0"),
    "temperature": (["--temperature", "0"], "--temperature 0"),
    "policy": (["--policy", "tovas"], "did you mean 'tova'?"),
    "size": (["--size", "0"], "--size 0: "),
    "batch": (["--batch", str(10**12)], f"--batch {10**12}"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values(name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.hf.loading.AutoModelForCausalLM", None)  # refused before the slow part
    words, told = BAD[name]
    code, out, err = run("eval", "story", "--out", tmp_path / "out", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err
    assert list(tmp_path.iterdir()) == []
