"""A tensor-parallel executor under `msrnn serve`: two processes share a model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers as tf

import msrnn
from msrnn.hf.loading import Loaded
from tests.helpers.tiny import build
from tests.helpers.torchrun import BASE, MSRNN, NEEDS_GLOO, TORCHRUN

pytestmark = NEEDS_GLOO

SIZE = 16
QUESTION: dict[str, Any] = {"prompt": "The captain opened the door and", "max_tokens": 8, "temperature": 0}


def ask(address: str, **more: Any) -> str:
    found = httpx.post(f"{address}/v1/completions", json={**QUESTION, "ignore_eos": True, **more}, timeout=120)
    assert found.status_code == 200, found.text
    return str(found.json()["choices"][0]["text"])


@pytest.mark.slow
def test_a_server_of_two_processes(small: Loaded, tmp_path: Path) -> None:
    model = build(tf.LlamaConfig(**{**BASE, "vocab_size": len(small.tokenizer)}))
    model.save_pretrained(tmp_path / "model")
    small.tokenizer.save_pretrained(tmp_path / "model")
    ids = small.tokenizer(QUESTION["prompt"], return_tensors="pt")["input_ids"]
    rnn = msrnn.MultiStateRNN(model, "tova", SIZE, recall=4)
    state = rnn.state()
    expected = []
    for prompt in (ids, ids):  # a session goes on with the same words
        out = rnn.generate(prompt, state=state, max_new_tokens=8, do_sample=False, eos_token_id=None)
        expected.append(small.tokenizer.decode(out[0, prompt.shape[1] :]))

    options = ["--model", tmp_path / "model", "--size", SIZE, "--recall", 4, "--port", 0]
    options += ["--sessions", tmp_path / "sessions"]
    torchrun = [*TORCHRUN, "--no-python", "--nproc-per-node", "2"]
    server = subprocess.Popen(
        [*torchrun, *MSRNN, "serve", *map(str, options)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        address = next(found[1] for line in server.stderr if (found := re.search(r"at (http://\S+)/v1", line)))
        assert ask(address) == expected[0]
        assert [ask(address, session_id="talk") for _ in range(2)] == expected
        assert json.loads(httpx.get(f"{address}/v1/sessions").text)["data"][0]["turns"] == 2
    finally:
        server.send_signal(signal.SIGTERM)
        _, said = server.communicate(timeout=120)
    assert "forcefully" not in said, "the other process had to be killed"
