from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from msrnn.analysis import figures
from msrnn.analysis.trace import TraceStore
from tests.helpers.command import Run
from tests.helpers.tagger import trained

WORDS = " ".join(f"Tom's dog barks. The dog barks loud {i} times." for i in range(12))
TINY = ("analyze", "--device", "cpu", "--length", 60, "--size", 8, "--size", 16, "--policy", "tova", "--policy", "h2o")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.txt").write_text(f"{name}. {WORDS}")
    return folder


@pytest.fixture
def nltk_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    nltk = pytest.importorskip("nltk", reason="parts of speech need nltk: pip install 'msrnn[analyze]'")
    monkeypatch.setattr(nltk.data, "path", [])
    return trained(tmp_path / "nltk_data")


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip figures, which take most of the time."""
    monkeypatch.setattr("msrnn.analysis.figures.draw_figures", lambda *_: None)


def test_tables_pictures_and_traces(
    run: Run, texts: Path, nltk_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        *TINY,
        "--text",
        texts,
        "--chunks-per-book",
        2,
        "--nltk-data",
        nltk_data,
        "--out",
        tmp_path / "new" / "out",
    )
    maps = figures.retention  # of every policy and size; one of them is drawn here
    monkeypatch.setattr(figures, "retention", lambda one, *rest: one.label == "h2o 16" and maps(one, *rest))
    code, out, err = run(*words)
    assert code == 0
    assert "4 of " in err
    made = tmp_path / "new" / "out"
    tables = (made / "analysis.md").read_text()
    assert all(
        title in tables for title in ("Tokens kept at each step", "by part of speech", "Agreement between policies")
    )
    assert out.count("\n") < 20
    assert [line.split()[:2] for line in out.splitlines() if line.split()[:1] in (["tova"], ["h2o"])] == [
        [name, size] for name in ("tova", "h2o") for size in ("8", "16")
    ]
    assert "All 10 tables with their definitions:" in out
    assert str(made / "analysis.md") in out
    assert len(list((made / "traces").glob("*.npz"))) == 4 * 4
    lines = {(line["tag"], line["policy"], line["size"]): line for line in csv.DictReader((made / "tags.csv").open())}
    every = lines["all", "tova", "8"]
    assert float(every["mean"]) == pytest.approx((9 * 10 / 2 + 51 * 9) / 60)  # steps see 1, 2, … 9 tokens, then 9 each
    assert int(every["tokens"]) == 240
    assert "- text: texts" in (made / "analysis.md").read_text()
    assert (made / "retention-layers-h2o-16.png").exists()

    monkeypatch.setattr("msrnn.analysis.figures.draw_figures", lambda *_: None)
    again = run(*words)
    assert (again.code, again.out) == (0, out)
    assert "nothing left to trace" in again.err


@pytest.mark.usefixtures("undrawn")
def test_tables_show_all_traces_of_the_folder(run: Run, texts: Path, tmp_path: Path) -> None:
    words = ("analyze", "--length", 60, "--text", texts, "--chunks-per-book", 1, "--out", tmp_path / "out")
    assert run(*words, "--policy", "h2o", "--size", 16, "--policy", "tova").code == 0
    (tmp_path / "out" / "traces" / "a-stranger-0.npz").write_bytes(b"")
    code, out, err = run(*words, "--policy", "TOVA", "--size", 8)
    assert code == 0, err
    shown = [line.split()[:2] for line in out.splitlines() if line.split()[:1] in (["tova"], ["h2o"])]
    assert shown == [["tova", "8"], ["h2o", "16"], ["tova", "16"]]
    recent = {line["policy"]: line for line in csv.DictReader((tmp_path / "out" / "recent.csv").open())}
    assert (recent["h2o"]["8"], bool(recent["h2o"]["16"])) == ("", True)
    other = run(*words, "--policy", "tova", "--size", 8, "--seed", 9, "--length", 50)  # of other chunks: not shown
    assert (other.code, "h2o" in other.out) == (0, False)


@pytest.mark.usefixtures("undrawn")
def test_traces_from_elsewhere(run: Run, texts: Path, tmp_path: Path) -> None:
    words = (*TINY, "--text", texts, "--traces", tmp_path / "traces", "--out")
    first = run(*words, tmp_path / "a")
    moved = (tmp_path / "traces").rename(tmp_path / "moved")
    second = run(*TINY, "--text", texts, "--traces", moved, "--out", tmp_path / "b")
    assert (second.code, second.out) == (0, first.out.replace(str(tmp_path / "a"), str(tmp_path / "b")))
    assert (tmp_path / "a" / "analysis.md").read_text() == (tmp_path / "b" / "analysis.md").read_text()
    assert "nothing left to trace" in second.err
    assert not (tmp_path / "b" / "traces").exists()


@pytest.mark.usefixtures("undrawn")
def test_an_interrupted_run_goes_on(run: Run, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, original, calls = (*TINY, "--text", texts, "--out", tmp_path / "out"), TraceStore._trace_batch, list[str]()

    def trace_batch(store: TraceStore, *arguments: Any) -> object:
        calls.append(store.label)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return original(store, *arguments)

    monkeypatch.setattr(TraceStore, "_trace_batch", trace_batch)
    stopped = run(*words, "--chunks-per-book", 1)
    assert (stopped.code, "stopped; run the same command to continue" in stopped.err) == (130, True)
    again = run(*words, "--chunks-per-book", 1)
    assert (again.code, "4 of 8 traces already done" in again.err) == (0, True)
    assert len(calls) == 2 * 4 + 1


@pytest.mark.usefixtures("undrawn")
def test_without_a_text(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verb = sys.modules["msrnn.cli.analyze"]
    monkeypatch.setattr(verb, "manual", lambda: WORDS)
    original = importlib.util.find_spec
    absent = ("datasets", "nltk")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else original(name))
    code, _, err = run("analyze", "--length", 60, "--size", 8, "--out", tmp_path / "out")
    assert code == 0
    assert "PG-19 is not available: reading Python's own manual instead" in err
    assert "no table of parts of speech" in err
    assert "Agreement between policies" not in (tmp_path / "out" / "analysis.md").read_text()


def test_without_matplotlib_only_the_pictures_are_missing(
    run: Run, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msrnn.evaluation.report.has_matplotlib", lambda: False)
    code, _, err = run(*TINY, "--text", texts, "--chunks-per-book", 1, "--out", tmp_path / "out")
    assert code == 0, err
    assert "no figures: matplotlib is not installed" in err
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".csv", ".md", ""}


BAD = {
    "text": (["--text", "none"], "none: no such file"),
    "policy": (["--policy", "tovas"], "did you mean 'tova'?"),
    "full": (["--policy", "FULL"], "--policy full"),
    "size": (["--size", "0"], "--size 0: "),
    "size of all": (["--size", "63", "--length", "64"], "--size 63"),
    "paper": (["--paper", "--size", "8"], "--paper"),
    "books": (["--books", "0"], "--books 0"),
    "batch": (["--batch", str(10**12)], f"--batch {10**12}"),
    "chunks": (["--chunks-per-book", "0"], "--chunks-per-book 0"),
    "out": (["--out", "file.txt"], "--out file.txt: a file"),
    "traces": (["--traces", "file.txt"], "--traces file.txt: a file"),
    "device": (["--device", "abacus"], "--device abacus: must be"),
    "nltk": (["--nltk-data", "."], "--nltk-data .: "),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values(name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file.txt").write_text("words")
    monkeypatch.setattr("msrnn.hf.loading.AutoModelForCausalLM", None)  # refused before the slow part
    if name == "nltk":
        monkeypatch.setattr(pytest.importorskip("nltk").data, "path", [])
    words, told = BAD[name]
    text = () if name == "text" else ("--text", "file.txt")
    code, out, err = run("analyze", *text, *words)
    assert (code, out) == (2, "")
    assert told in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.txt"]
