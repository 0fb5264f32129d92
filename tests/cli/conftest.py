"""A tiny random model with a tokenizer of characters, in a folder, and the command line run inside the test."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from characters import BOS, END, character_tokenizer
from command import Ran, Run
from transformers import LlamaConfig, LlamaForCausalLM

from msrnn.cli import main


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as `--model` takes it."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=BOS,
        eos_token_id=END,
        pad_token_id=END,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def uncollected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations collect garbage between cells, which takes longer than all that these tests compute."""
    monkeypatch.setattr("gc.collect", lambda *_: 0)


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("generate", "hello")`: a verb on the tiny model; `small=True` leaves the model to the verb."""

    def run(*arguments: object, stdin: str = "", small: bool = False) -> Ran:
        words = [str(a) for a in arguments]
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code = main(words if small else [*words, "--model", str(folder)])
        return Ran(code, *capsys.readouterr())

    return run
