from __future__ import annotations

import re
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from msrnn.cli.demo import announcement, cells, remark, verdict
from msrnn.cli.files import _MANUAL_TOPICS, manual
from msrnn.evaluation.benchmark.reading import Measured
from msrnn.evaluation.benchmark.timing import Times
from tests.helpers.command import TEXT, Run


def test_demo_on_a_file(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    code, out, err = run("demo", "--text", tmp_path / "text", "--tokens", 200, "--size", 32)
    assert code == 0
    reason = "reading 200 tokens under 3 policies, and parts of them again to time it"
    assert re.fullmatch(rf"{reason}: about \d+ seconds, more if the machine is busy\n", err)
    assert "Times are medians of repeated runs." in out
    shown = [line.split() for line in out.splitlines()]
    rows = [cells for cells in shown if cells and cells[0] in ("full", "window+4", "tova")][:3]
    assert [row[0] for row in rows] == ["full", "window+4", "tova"]
    assert [row[2] for row in rows] == ["199", "32", "32"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(TEXT)["input_ids"][:200]])
    with torch.no_grad():
        perplexity = model(input_ids=ids, labels=ids).loss.exp().item()
    assert float(rows[0][1]) == pytest.approx(perplexity, rel=1e-3)
    assert len({row[1] for row in rows}) == 3
    assert "Holding 32 of 199 KV rows per layer" in out


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_demo_can_be_read_at_any_width(columns: int, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    (tmp_path / "text").write_text(TEXT)
    code, out, _ = run("demo", "--text", tmp_path / "text", "--tokens", 100, "--size", 16)
    assert (code, "…" in out) == (0, False)
    table, _, rest = out.partition("tova continues")
    assert max(map(len, table.splitlines())) <= columns
    for word in ("policy", "perplexity", "window+4", "ms/token", "reading", "decoding", "100 tokens"):
        assert word in table
    sentence = rest[rest.index("Holding") :]
    assert max(map(len, sentence.splitlines())) <= columns


@pytest.mark.parametrize(("size", "tokens"), [(5000, 200), (199, 200)])
def test_a_size_that_evicts_nothing_is_refused_before_the_model_is_loaded(
    size: int, tokens: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msrnn.hf.loading.AutoModelForCausalLM", None)
    code, out, err = run("demo", "--size", size, "--tokens", tokens)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"--size {size}: nothing is evicted from a text of 200 tokens" in err
    assert "use a size below 199" in err


def test_a_size_that_evicts_nothing_of_a_short_text(run: Run, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a short text")
    code, _, err = run("demo", "--size", 64, "--text", tmp_path / "text")
    assert (code, "--size 64: nothing is evicted from a text of 13 tokens" in err) == (2, True)


def test_demo_text_too_short(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrnn.hf.chat_template.encode", lambda *_, **__: torch.tensor([[7]]))
    (tmp_path / "text").write_text("a")
    code, _, err = run("demo", "--text", tmp_path / "text")
    assert (code, err.count("\n")) == (2, 1)
    assert "longer text" in err


ROWS = [
    Measured("full", 10.0, 1000, 4_000_000, Times(4.04, 3.0, 5.0), Times(70, 60, 80)),
    Measured("window+4", 12.0, 100, 400_000, Times(2, 1, 9, steady=False), Times(60, 50, 70)),
    Measured("tova", 9.5, 100, 400_000, Times(2, 1, 3), Times(60, 50, 900, steady=False)),
]


def test_times_that_disagree_are_told() -> None:
    assert cells(ROWS[0])[-2:] == ["4.0", "70.0"]
    assert remark(ROWS[:1]) == "Times are medians of repeated runs."
    assert "Runs of window+4, tova still differ by more than a tenth" in remark(ROWS)
    assert remark(ROWS).endswith("or other processes used the processors meanwhile: the machine is busy.")


@pytest.mark.parametrize("busy", [True, False])
def test_a_busy_machine_is_told(busy: bool, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the runs of each policy agree."""
    monkeypatch.setattr("msrnn.evaluation.benchmark.timing._once", lambda *_: 3.0)
    monkeypatch.setattr("msrnn.evaluation.benchmark.timing.OtherProcesses.disturb", lambda *_: busy)
    (tmp_path / "text").write_text(TEXT)
    code, out, _ = run("demo", "--text", tmp_path / "text", "--tokens", 100, "--size", 16)
    told = "Runs of full, window+4, tova still differ by more than a tenth after three rounds, or other processes used"
    assert (code, told in " ".join(out.split())) == (0, busy)


@pytest.mark.parametrize(("seconds", "told"), [(0.1, "2 seconds"), (89, "89 seconds"), (200, "3 minutes")])
def test_how_long_it_takes(seconds: float, told: str) -> None:
    assert f"about {told}," in announcement(2048, seconds)


def test_verdict_is_computed() -> None:
    assert verdict(ROWS) == (
        "Holding 100 of 1,000 KV rows per layer (400.0 kB instead of 4.0 MB) "
        "changes perplexity by +20.0% under window+4 and -5.0% under tova."
    )


def test_the_manual_is_long_enough_and_in_order() -> None:
    assert len(manual()) > 20_000
    starts = [manual().index(topics[name].strip()) for name in _MANUAL_TOPICS]
    assert starts == sorted(starts)
    assert starts[0] == 0
