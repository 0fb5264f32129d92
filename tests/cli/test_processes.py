"""Commands in processes that share a model: they print and write once, and what they do in one process."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import transformers as tf

from msrnn.cli import main
from msrnn.evaluation.store import read_records
from tests.helpers.characters import character_tokenizer
from tests.helpers.tiny import build
from tests.helpers.torchrun import BASE, MSRNN, NEEDS_GLOO, TORCHRUN

pytestmark = NEEDS_GLOO


def test_verbs_that_work_in_one_process_only() -> None:
    env = {**os.environ, "TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0"}
    for words, message in (
        (["policies"], "torchrun: policies works in one process; serve, generate, read and eval in several"),
        (["generate", "-"], "-: standard input has one reader, but there are several processes; give a file"),
    ):
        found = subprocess.run([*MSRNN, *words], env=env, capture_output=True, text=True, check=False)
        assert (found.returncode, found.stderr) == (2, f"msrnn: {message}\n")


@pytest.mark.slow
def test_commands_of_two_processes(tmp_path: Path, capsys: Any) -> None:
    """Slow because of the processes: four jobs, each with two of them."""
    tokenizer = character_tokenizer()
    build(tf.LlamaConfig(**BASE)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "book.txt").write_text("".join(f"{i} words. " for i in range(60)))
    about = ["--model", str(tmp_path / "model"), "--size", "16"]

    def together(*words: str) -> subprocess.CompletedProcess[str]:
        torchrun = [*TORCHRUN, "--no-python", "--nproc-per-node", "2"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*torchrun, *MSRNN, *words, *about], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done

    def alone(*words: str) -> str:
        assert main([*words, *about]) == 0
        return str(capsys.readouterr().out)

    reads = ["read", str(tmp_path / "book.txt"), "--save"]
    done = together(*reads, str(tmp_path / "two.safetensors"))
    assert len(re.findall("tokens read", done.stdout)) == 1
    alone(*reads, str(tmp_path / "one.safetensors"))
    assert not [*tmp_path.glob("*.partial*")]
    asks = ["generate", "More", "--max-new-tokens", "12", "--greedy", "--state"]
    expected = alone(*asks, str(tmp_path / "one.safetensors"))
    assert alone(*asks, str(tmp_path / "two.safetensors")) == expected
    assert together(*asks, str(tmp_path / "one.safetensors")).stdout == expected
    sampled = together("generate", "More", "--max-new-tokens", "12", "--sample")
    assert "12 tokens" in sampled.stderr

    evaluates = ["eval", "perplexity", "--text", str(tmp_path / "book.txt"), "--length", "64", "--policy", "tova"]
    done = together(*evaluates, "--out", str(tmp_path / "two"))
    assert len(re.findall("written to", done.stderr)) == 1
    alone(*evaluates, "--out", str(tmp_path / "one"))
    rows = [read_records(tmp_path / folder / "perplexity.jsonl") for folder in ("one", "two")]
    assert [row["chunks"] for row in rows[0]] == [row["chunks"] for row in rows[1]]
    assert [row["fingerprint"] for row in rows[0]] == [row["fingerprint"] for row in rows[1]]
    for one, two in zip(*rows, strict=True):
        assert two["nll"] == pytest.approx(one["nll"], abs=1e-3)
