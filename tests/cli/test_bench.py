from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.command import Run

TINY = ("bench", "--random-weights", "tiny", "--device", "cpu", "--size", 8, "--length", 40)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.evaluation.benchmark.timing.BUFFER_BYTES", {"cpu": 2**20})
    monkeypatch.setattr("msrnn.evaluation.benchmark.timing.ROUNDS", 1)
    monkeypatch.setattr("msrnn.evaluation.benchmark.measurement.REPEATS", 0)


def test_bench_writes_rows_a_table_and_a_figure(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    words = (*TINY, "--max-batch", 3, "--out", folder, "--with", "benchmarks.published:published")
    code, out, err = run(*words, small=True)
    assert code == 0
    assert all(name in out for name in ("full", "full, dynamic", "tova 8", "published tova 8"))
    assert "tova 8: a step of 3 sequences, 8 KV rows each" in err
    rows = [json.loads(line) for line in (folder / "efficiency.jsonl").read_text().splitlines()]
    assert {row["cell"] for row in rows} == {"state", "step", "largest", "bandwidth", "products", "prefill", "row"}
    assert all(row["low"] <= row["value"] <= row["high"] for row in rows if row["cell"] in ("step", "prefill"))
    assert all(row["value"] > 0 for row in rows)
    assert all(row["model"] == "random weights of tiny" and row["torch"] and row["length"] == 40 for row in rows)
    table = (folder / "efficiency.md").read_text()
    assert [line.split("|")[3].strip() for line in table.splitlines()[2:6]] == ["3"] * 4
    assert (folder / "efficiency.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "efficiency.svg").read_text()

    again = run(*words, small=True)
    assert (again.code, again.out) == (0, out)
    measured = sum(row["cell"] != "row" for row in rows)
    assert again.err.startswith(f"{measured} measurements already done")
    assert again.err.count("\n") == 2
    assert len((folder / "efficiency.jsonl").read_text().splitlines()) == len(rows)


def test_a_folder_keeps_its_rows_and_shows_them_all(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.evaluation.report.has_matplotlib", lambda: False)

    def benched(size: int, *more: str) -> str:
        words = ("bench", "--random-weights", "tiny", "--device", "cpu", "--size", size, "--length", 40, "--batch", 1)
        ran = run(*words, "--out", tmp_path, *more, small=True)
        assert ran.code == 0, ran.err
        return ran.err

    benched(8)
    first = (tmp_path / "efficiency.jsonl").read_text()
    err = benched(4)
    assert "the tables also show tova 8, from earlier commands" in err
    assert "tova 8: a step" not in err
    table = (tmp_path / "efficiency.md").read_text()
    assert all(f"| {name} |" in table for name in ("full", "tova 4", "tova 8"))
    before = (tmp_path / "efficiency.jsonl").read_text()
    assert before.startswith(first)
    assert "tova 4: a step" in benched(4, "--force")
    assert (tmp_path / "efficiency.jsonl").read_text().startswith(before)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ((), "stopped; without --out nothing is kept"),
        (("--out", "here"), "stopped; run the same command to continue"),
        (("--out", "here", "--force"), "stopped; what was computed is kept. Run the same command without --force"),
    ],
    ids=["no folder", "folder", "force"],
)
def test_ctrl_c_says_what_is_kept(
    more: tuple[str, ...], line: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("msrnn.evaluation.benchmark.measurement.Benchmark.rows", interrupted)
    code, out, err = run(*TINY, "--batch", 1, *more, small=True)
    assert (code, out) == (130, "")
    assert line in err


def test_bench_of_a_model(run: Run, folder: Path) -> None:
    words = ("--size", 8, "--length", 20, "--batch", 2, "--policy", "window")
    code, out, _ = run("bench", "--device", "cpu", *words)
    assert code == 0
    assert "window 8" in out
    assert str(folder) in "".join(line.strip() for line in out.splitlines())


def test_without_matplotlib_only_the_figure_is_missing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msrnn.evaluation.report.has_matplotlib", lambda: False)
    code, out, err = run(*TINY, "--batch", 1, "--out", tmp_path / "new", small=True)
    assert (code, "tova 8" in out) == (0, True)
    assert "no figures: matplotlib is not installed; pip install 'msrnn[plots]'" in err
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["efficiency.jsonl", "efficiency.md"]


BAD = {
    "size": (["--size", "0"], "--size 0: "),
    "length": (["--length", "16"], "--length 16"),
    "full": (["--policy", "full"], "--policy full"),
    "batch": (["--batch", "0"], "--batch 0"),
    "equal batch": (["--equal-batch", "-1"], "--equal-batch -1"),
    "state dtype": (["--state-dtype", "int3"], "--state-dtype int3"),
    "positions": (["--positions", "compac"], "did you mean 'compact'"),
    "shape": (["--random-weights", "lama"], "--model is given too"),
    "contender": (["--with", "nowhere:at_all"], "nowhere:at_all"),
    "folder": (["--out", "file"], "--out file"),
    "rows": (["--out", "foreign"], "efficiency.jsonl, line 1: damaged"),
    "many": (["--batch", str(10**12)], f"--batch {10**12}: must be a whole number, from 1 to 65,536"),
    "more than many": (["--max-batch", str(10**22)], f"--max-batch {10**22}"),
    "dtype": (["--dtype", "int3"], "--dtype int3: "),
    "device": (["--device", "abacus"], "--device abacus: "),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values(name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("foreign").mkdir()
    Path("foreign/efficiency.jsonl").write_text("words\n")
    monkeypatch.setattr("msrnn.hf.loading.AutoModelForCausalLM", None)  # refused before the slow part
    words, told = BAD[name]
    code, out, err = run("bench", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err


def test_unknown_shape(run: Run) -> None:
    code, _, err = run("bench", "--random-weights", "llama-2", small=True)
    assert (code, err.count("\n")) == (2, 1)
    assert "llama-2-7b" in err


def test_weights_that_do_not_fit_are_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.evaluation.benchmark.random_weights.query_free_memory", lambda _: 1000)
    code, _, err = run("bench", "--random-weights", "tiny", "--device", "cpu", small=True)
    assert code == 2
    assert "do not fit into the 1.0 kB that cpu has free" in err
