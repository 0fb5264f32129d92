from __future__ import annotations

import csv
import json
import math
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from msrnn.evaluation.future_reader import FutureReader
from msrnn.evaluation.tasks.perplexity import Reader
from tests.helpers.command import Run

LETTERS = string.ascii_lowercase
TINY = ("eval", "perplexity", "--device", "cpu", "--length", 33, "--size", 8, "--size", 16)
ROWS = ("--policy", "tova", "--policy", "window+4", "--policy", "full", "--policy", "baseline")


def test_perplexity_writes_tables_and_a_figure(run: Run, folder: Path, texts: Path, tmp_path: Path) -> None:
    words = (*TINY, *ROWS, "--text", texts, "--out", tmp_path / "new" / "out", "--batch", 3)
    code, out, err = run(*words)
    assert code == 0
    assert (
        "4 of 4 chunks of 33 tokens, from 2 of 3 texts (shorter than a chunk: 1; tokens left over at the ends: 8)"
        in err
    )
    assert all(name in out for name in ("tova", "window+4", "full", "baseline", "against tova"))
    made = {path.name: path for path in (tmp_path / "new" / "out").iterdir()}
    assert sorted(made) == [f"perplexity.{kind}" for kind in ("csv", "jsonl", "md", "png", "svg")]
    lines = list(csv.DictReader(made["perplexity.csv"].read_text().splitlines()))
    figures = {(line["policy"], int(line["size"])): float(line["perplexity"]) for line in lines}
    assert figures["full", 8] == figures["full", 16] == pytest.approx(whole(folder, texts), rel=1e-4)
    assert len({*figures.values()}) == 7
    assert all(line["tokens"] == str(4 * 32) for line in lines)
    assert "- first token: <s>" in made["perplexity.md"].read_text()
    rows = [json.loads(line) for line in made["perplexity.jsonl"].read_text().splitlines()]
    assert [len(row["chunks"]) for row in rows] == [3, 1] * 7
    assert {row["text"] for row in rows} == {"texts"}

    before = {name: path.read_bytes() for name, path in made.items()}
    again = run(*words)
    assert (again.code, again.out) == (0, out)
    assert "nothing left to compute" in again.err
    assert {name: path.read_bytes() for name, path in made.items()} == before


@pytest.mark.usefixtures("undrawn")
def test_the_true_future_is_a_row(run: Run, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted and continued; the results of another definition are not shown."""
    rows = ("--policy", "future", "--policy", "tova", "--policy", "full")
    words, original, calls = (*TINY, "--size", 33, *rows, "--text", texts, "--out"), FutureReader.nll, list[int]()
    expected = run(*words, tmp_path / "whole")
    assert expected.code == 0, expected.err

    def nll(reader: FutureReader, *arguments: Any) -> list[float]:
        calls.append(reader.future.size)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return original(reader, *arguments)

    monkeypatch.setattr(FutureReader, "nll", nll)
    assert run(*words, tmp_path / "out").code == 130
    again = run(*words, tmp_path / "out")
    assert (again.code, again.out) == (0, expected.out)
    assert calls == [8] * 4 + [16] * 2 + [16] * 3
    lines = list(csv.DictReader((tmp_path / "out" / "perplexity.csv").read_text().splitlines()))
    figures = {(line["policy"], int(line["size"])): line["perplexity"] for line in lines}
    assert figures["future", 33] == figures["full", 33]
    assert len({*figures.values()}) == 5
    path = tmp_path / "out" / "perplexity.jsonl"
    path.write_text(path.read_text().replace('"numbers": {"version": 1, ', '"numbers": {"version": 0, '))
    other = run(*TINY, "--policy", "tova", "--text", texts, "--out", tmp_path / "out")
    assert (other.code, "full" in other.out, "future" in other.out) == (0, True, False)


@pytest.mark.usefixtures("undrawn")
def test_rows_that_recall(run: Run, texts: Path, tmp_path: Path) -> None:
    """They are next to those without recall, in one folder; enough recalled rows are the full model."""
    words = (*TINY, "--text", texts, "--out", tmp_path, "--policy", "tova")
    assert run(*words).code == 0
    recalling = (*words, "--policy", "full", "--recall", 33)
    assert run(*recalling, "--against", "tova").code == 0
    every = run(*recalling, "--recall-every", 4, "--recall-while-reading", 2)
    assert every.code == 0
    assert "perplexity against tova + 33 recalled every 2 at the same size" in every.out
    again = run(*recalling, "--recall-every", 2)
    assert "nothing left to compute" in again.err
    lines = list(csv.DictReader((tmp_path / "perplexity.csv").read_text().splitlines()))
    figures = {(line["policy"], int(line["size"])): float(line["perplexity"]) for line in lines}
    names = ["tova + 33 recalled every 2", "full", "tova", "tova + 33 recalled"]
    assert list(figures) == [(name, size) for name in names for size in (8, 16)]
    assert figures["tova + 33 recalled", 8] == pytest.approx(figures["full", 8], rel=1e-4)
    for other in ("full", "tova"):
        assert figures["tova + 33 recalled every 2", 8] != pytest.approx(figures[other, 8], rel=1e-3)
    rows = [json.loads(line) for line in (tmp_path / "perplexity.jsonl").read_text().splitlines()]
    assert {row["policy"] for row in rows} == set(names)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--recall", -1), "--recall -1: must be a whole number of KV rows, 0 or more"),
        (("--recall-every", 4), "--recall-every 4: nothing is archived"),
        (("--policy", "full + 8 recalled"), "--policy full + 8 recalled: evicts nothing that could be recalled"),
        (("--recall", 8, "--against", "h2o"), "--against h2o + 8 recalled: not among the policies"),
    ],
)
def test_recall_that_is_refused(
    words: tuple[object, ...], message: str, run: Run, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msrnn.hf.loading.AutoModelForCausalLM", None)
    done = run(*TINY, "--text", texts, *words)
    assert (done.code, message in done.err) == (2, True), done.err


def whole(folder: Path, texts: Path) -> float:
    """The perplexity of the unmodified model; one token per letter, six special ones and those that sort before."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    first = 6 + sorted(string.printable).index("a")
    nll = 0.0
    for name in ("one", "two"):
        ids = [first + LETTERS.index(letter) for letter in (texts / f"{name}.txt").read_text()]
        for start in (0, 32):
            chunk = torch.tensor([[1, *ids[start : start + 32]]])
            with torch.no_grad():
                nll += 32 * model(input_ids=chunk, labels=chunk).loss.item()
    return math.exp(nll / (4 * 32))


@pytest.mark.usefixtures("undrawn")
def test_an_interrupted_run_goes_on(run: Run, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, original, calls = (*TINY, *ROWS, "--text", texts, "--out"), Reader.nll, list[str]()

    def nll(reader: Reader, *arguments: Any) -> list[float]:
        made = reader.rnn.spec.fingerprint
        calls.append(f"{made['policy']} {made['size']}")
        if len(calls) == 10:
            raise KeyboardInterrupt
        return original(reader, *arguments)

    expected = run(*words, tmp_path / "whole")
    monkeypatch.setattr(Reader, "nll", nll)
    stopped = run(*words, tmp_path / "out")
    assert (stopped.code, "stopped; run the same command to continue" in stopped.err) == (130, True)
    assert len((tmp_path / "out" / "perplexity.jsonl").read_text().splitlines()) == 9
    again = run(*words, tmp_path / "out")
    assert (again.code, again.out) == (0, expected.out)
    assert "9 of 28 chunks already done" in again.err
    assert len(calls) == 4 * 7 + 1
    anew = run(*words, tmp_path / "out", "--force")
    assert (anew.out, len(calls)) == (expected.out, 2 * 4 * 7 + 1)


@pytest.mark.usefixtures("undrawn")
def test_force_computes_only_what_is_asked_for_and_keeps_the_rest(
    run: Run, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at any moment, the folder has a result for every cell: the new one, or else the old one."""
    words, path = (*TINY, "--text", texts, "--out", tmp_path / "out"), tmp_path / "out" / "perplexity.jsonl"
    assert run(*words, *ROWS).code == 0
    before = path.read_text()
    first = list(csv.DictReader((tmp_path / "out" / "perplexity.csv").read_text().splitlines()))
    original, calls = Reader.nll, list[str]()

    def nll(reader: Reader, *arguments: Any) -> list[float]:
        made = reader.rnn.spec.fingerprint
        calls.append(f"{made['policy']} {made['size']}")
        if len(calls) == 3:
            raise KeyboardInterrupt
        return [value + 1 for value in original(reader, *arguments)]

    monkeypatch.setattr(Reader, "nll", nll)
    stopped = run(*TINY[:-2], *words[len(TINY) :], "--policy", "window+4", "--force")
    assert stopped.code == 130
    assert "stopped; what was computed is kept" in stopped.err
    assert path.read_text().startswith(before)
    assert len(path.read_text().splitlines()) == len(before.splitlines()) + 2
    again = run(*TINY[:-2], *words[len(TINY) :], "--policy", "window+4", "--force")
    assert again.code == 0
    assert set(calls) == {"window+4 8"}
    assert len(calls) == 3 + 4
    shown = run(*words, *ROWS)
    assert (shown.code, len(calls)) == (0, 3 + 4)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["policy"] for row in rows[28:]] == ["window+4"] * 6
    lines = list(csv.DictReader((tmp_path / "out" / "perplexity.csv").read_text().splitlines()))
    was = {(line["policy"], line["size"]): line["nll"] for line in first}
    now = {(line["policy"], line["size"]): line["nll"] for line in lines}
    assert {place for place in now if now[place] != was[place]} == {("window+4", "8")}
    assert float(now["window+4", "8"]) == pytest.approx(float(was["window+4", "8"]) + 1 / 32)


@pytest.mark.usefixtures("undrawn")
def test_a_damaged_store_is_named_and_can_be_gone_on_with(run: Run, texts: Path, tmp_path: Path) -> None:
    words, path = (*TINY, "--text", texts, "--out", tmp_path / "out"), tmp_path / "out" / "perplexity.jsonl"
    expected = run(*words)
    lines = path.read_bytes().split(b"\n")
    without = json.loads(lines[4])
    del without["nll"]
    lines[1], lines[4] = lines[1][:30] + b"\0\xff", json.dumps(without).encode()
    path.write_bytes(b"\n".join(lines))
    code, out, err = run(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{path}, line 2: damaged, not JSON" in err
    assert "(and 1 more lines)" in err
    assert "--skip-damaged" in err
    code, out, err = run(*words, "--skip-damaged")
    assert (code, out) == (0, expected.out)
    assert "18 of 20 chunks already done" in err
    assert (tmp_path / "out" / "perplexity.damaged").read_bytes() == lines[1] + b"\n" + lines[4] + b"\n"


def test_the_tables_of_a_folder_show_all_its_rows(run: Run, folder: Path, texts: Path, tmp_path: Path) -> None:
    words = ("eval", "perplexity", "--device", "cpu", "--text", texts, "--out", tmp_path, "--length", 33)
    run(*words, "--policy", "tova", "--policy", "full", "--size", 8)
    run(*words, "--policy", "tova", "--size", 8, "--dtype", "bfloat16")
    code, out, err = run(*words, "--policy", "window+4", "--size", 16)
    assert code == 0
    assert "the tables also show full, tova 8, from earlier commands" in err
    assert "4 records of other models, dtypes or data are in the folder, but not in these tables" in err
    table = [line for line in (tmp_path / "perplexity.md").read_text().splitlines() if line.startswith("|")]
    assert table[0] == "| policy | 8 | 16 |"
    shown = {cells[1]: cells[2:4] for cells in ([x.strip() for x in line.split("|")] for line in table[2:5])}
    assert {name: [cell != "—" for cell in cells] for name, cells in shown.items()} == {
        "window+4": [False, True],
        "full": [True, True],
        "tova": [True, False],
    }
    lines = list(csv.DictReader((tmp_path / "perplexity.csv").read_text().splitlines()))
    assert [(line["policy"], line["size"]) for line in lines] == [
        ("window+4", "16"),
        ("full", "8"),
        ("full", "16"),
        ("tova", "8"),
    ]
    assert "tova" in out


def test_without_matplotlib_only_the_figure_is_missing(
    run: Run, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msrnn.evaluation.report.has_matplotlib", lambda: False)
    code, out, err = run(*TINY, "--policy", "tova", "--text", texts, "--out", tmp_path / "out")
    assert (code, "tova" in out) == (0, True)
    assert "no figures: matplotlib is not installed" in err
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".csv", ".jsonl", ".md"]


@pytest.mark.usefixtures("undrawn")
def test_the_paper_and_another_to_compare_with(run: Run, texts: Path, tmp_path: Path) -> None:
    words = ("eval", "perplexity", "--text", texts, "--length", 20, "--out", tmp_path / "out", "--books", 1)
    code, out, _ = run(*words, "--paper", "--against", "window+4", "--chunks-per-book", 1)
    assert code == 0  # every size is longer than these chunks
    assert "against window+4" in out
    assert out.count("h2o-layer") == 2
    assert len((tmp_path / "out" / "perplexity.jsonl").read_text().splitlines()) == 1


@pytest.mark.usefixtures("undrawn")
def test_the_one_compared_with_may_have_any_of_its_names(run: Run, texts: Path, tmp_path: Path) -> None:
    rows = ("--policy", "decay=0.5", "--policy", "tova")
    code, out, err = run(*TINY, *rows, "--text", texts, "--out", tmp_path / "out", "--against", "decay=0.5")
    assert code == 0, err
    assert "against decay=0.5,per=layer" in " ".join(out.split())


BAD = {
    "text": (["--text", "none"], "none: no such file"),
    "policy": (["--policy", "tovas"], "did you mean 'tova'?"),
    "size": (["--size", "0"], "--size 0: "),
    "protects too much": (["--policy", "window+8", "--size", "8"], "first=8"),
    "baseline": (["--policy", "baseline", "--size", "1"], "1: a piece of the baseline"),
    "future": (["--policy", "future:upper"], "--policy future:upper: the true future has no budget"),
    "length": (["--length", "1"], "--length 1"),
    "books": (["--books", "0"], "--books 0"),
    "chunks": (["--chunks-per-book", "0"], "--chunks-per-book 0"),
    "batch": (["--batch", "0"], "--batch 0"),
    "against": (["--against", "h2o"], "add --policy h2o"),
    "paper": (["--paper", "--size", "8"], "--paper"),
    "out": (["--out", "file.txt"], "--out file.txt: a file"),
    "rows": (["--out", "foreign"], "line 1: damaged, not JSON"),
    "many": (["--batch", str(10**12)], f"--batch {10**12}: must be a whole number, from 1 to 65,536"),
    "fewer than none": (["--batch", "-1"], "--batch -1"),
    "device": (["--device", "abacus"], "--device abacus: "),
    "dtype": (["--dtype", "int3"], "--dtype int3: "),
    "hub": (["--out", "new"], "msrnn[eval]"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values(name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file.txt").write_text("words")
    Path("foreign").mkdir()
    Path("foreign/perplexity.jsonl").write_text("words\n")
    monkeypatch.setattr("msrnn.hf.loading.AutoModelForCausalLM", None)  # refused before the slow part
    if name == "hub":
        monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    words, told = BAD[name]
    text = () if name in ("hub", "text") else ("--text", "file.txt")
    code, out, err = run("eval", "perplexity", *text, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.txt", "foreign"]


def test_chunks_longer_than_the_texts(run: Run, texts: Path, tmp_path: Path) -> None:
    code, _, err = run("eval", "perplexity", "--text", texts, "--length", 100, "--out", tmp_path / "out")
    assert code == 2
    assert err.count("\n") == 2
    assert err.endswith("100: the longest text has 71 tokens; use a smaller number\n")
