"""A model of characters, texts, and the records that a command writes for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

from msrnn.cli import main
from msrnn.hf.loading import Loaded
from tests.helpers.characters import character_model, character_tokenizer
from tests.helpers.word_counts import TEXTS

Records = list[dict[str, object]]
Command = Callable[..., Records]


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    character_model().save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    (path / "texts").mkdir()
    for name, text in TEXTS.items():
        (path / "texts" / f"{name}.txt").write_text(text)
    return path


@pytest.fixture(scope="package")
def model(folder: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    return loaded


@pytest.fixture
def of_command(folder: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The records that a command writes. It computes with the very tensors of `model`: others may be aligned
    differently, which changes the last bits."""
    monkeypatch.setattr("msrnn.hf.loading.load", lambda *_, **__: Loaded(model, character_tokenizer()))
    monkeypatch.setattr("msrnn.cli.results_folder.draw_if_possible", lambda _: ())  # the figure is not compared

    def run(out: Path, verb: str, *words: str) -> Records:
        common = ["--model", str(folder), "--device", "cpu", "--text", str(folder / "texts"), "--out", str(out)]
        assert main(["eval", verb, *common, *words]) == 0
        return [json.loads(line) for line in (out / f"{verb}.jsonl").read_text().splitlines()]

    return run


@pytest.fixture
def of_chat_command(folder: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The records that `msrnn eval chat-memory FILE` writes, with the very tensors of `model`."""
    monkeypatch.setattr("msrnn.hf.loading.load", lambda *_, **__: Loaded(model, character_tokenizer()))

    def run(out: Path, file: Path, *words: str) -> Records:
        common = ["--model", str(folder), "--device", "cpu", "--out", str(out)]
        assert main(["eval", "chat-memory", str(file), *common, *words]) == 0
        return [json.loads(line) for line in (out / "chat-memory.jsonl").read_text().splitlines()]

    return run
