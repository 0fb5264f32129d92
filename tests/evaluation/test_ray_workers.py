"""Evaluations on a Ray cluster of this machine: real processes, of which some are killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from msrnn.cli import main
from msrnn.evaluation import ray_workers
from msrnn.evaluation.runner import Message
from msrnn.evaluation.store import Record, read_records
from tests.helpers.ray_here import cluster as cluster
from tests.helpers.ray_here import model as model
from tests.helpers.ray_here import processes

WORKER = "ray::_compute_cell"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    for name in ("one", "two"):
        (tmp_path / "texts" / f"{name}.txt").write_text("".join(f"{name} has {i} words. " for i in range(40)))
    return tmp_path / "texts"


def identified(rows: list[Record]) -> dict[Any, Any]:
    """Results by what identifies them; none twice."""
    found: dict[Any, Any] = {}
    for row in rows:
        for chunk, nll in zip(row["chunks"], row["nll"], strict=True):
            key = (row["policy"], row["size"], row.get("positions"), row.get("start"), chunk, row["dtype"])
            assert key not in found
            found[key] = nll
    return found


def test_a_sweep(
    cluster: str, model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def run(out: str, *more: str) -> int:
        words = ["eval", "perplexity", "--model", str(model), "--text", str(texts), "--length", "64"]
        sizes = ["--policy", "tova", "--policy", "window", "--policy", "full", "--size", "8", "--size", "16"]
        return main([*words, *sizes, "--batch", "2", "--out", str(tmp_path / out), *more])

    assert run("alone") == 0
    expected = identified(read_records(tmp_path / "alone" / "perplexity.jsonl"))

    # A worker dies after its first row.
    killed: list[int] = []
    begun = ray_workers._Tasks.next

    def kills(tasks: Any) -> Iterator[Message]:
        for computed in begun(tasks):
            yield computed
            if computed.record is not None and not killed:
                killed.extend(processes(WORKER))
                for number in killed:
                    os.kill(number, signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(ray_workers._Tasks, "next", kills)
        assert run("killed", "--ray", "--device", "cpu") == 0
    assert killed
    rows = read_records(tmp_path / "killed" / "perplexity.jsonl")
    assert identified(rows) == pytest.approx(expected, abs=1e-3)
    assert {row["machine"].split(", ")[-1] for row in rows} == {"1 threads"}  # what the worker has, not this process

    # Ctrl-C keeps what was computed, ends the workers, and the same command goes on.
    def interrupts(tasks: Any) -> Iterator[Message]:
        for computed in begun(tasks):
            yield computed
            if computed.record is not None:
                raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ray_workers._Tasks, "next", interrupts)
        assert run("stopped", "--ray", cluster, "--cpus", "1") == 130
    kept = len(read_records(tmp_path / "stopped" / "perplexity.jsonl"))
    assert 0 < kept < len(rows)
    until = time.monotonic() + 120
    while processes(WORKER):
        assert time.monotonic() < until, "workers go on after Ctrl-C"
        time.sleep(0.1)
    capsys.readouterr()
    assert run("stopped", "--ray", "--cpus", "1") == 0
    assert f"{2 * kept} of {len(expected)} chunks already done" in capsys.readouterr().err
    assert identified(read_records(tmp_path / "stopped" / "perplexity.jsonl")) == pytest.approx(expected, abs=1e-3)


def test_other_evaluations(cluster: str, model: Path, texts: Path, tmp_path: Path) -> None:
    """Stories begin with those of the full model; long texts are read in legs, with files between them."""
    about = ["--model", str(model), "--batch", "2", "--size", "16"]
    for out, more in (("alone", []), ("ray", ["--ray", "--device", "cpu"])):
        to = ["--out", str(tmp_path / out), *more]
        assert main(["eval", "story", "--stories", "3", "--max-new-tokens", "40", "--no-chat", *about, *to]) == 0
        reads = ["--text", str(texts), "--tokens", "300", "--window", "50", "--leg", "100", "--row", "tova@original"]
        assert main(["eval", "extrapolation", *reads, *about, *to]) == 0
    stories = [
        {(row["policy"], row["seed"]): row["ids"] for row in read_records(tmp_path / out / "story.jsonl")}
        for out in ("alone", "ray")
    ]
    assert stories[0] == stories[1]
    read = [identified(read_records(tmp_path / out / "extrapolation.jsonl")) for out in ("alone", "ray")]
    assert read[0].keys() == read[1].keys()
    assert all(read[0][key] == pytest.approx(read[1][key], abs=1e-3) for key in read[0])
    assert not (tmp_path / "ray" / "extrapolation.states").exists()
