"""A tiny random model with a tokenizer of characters, in a folder, and the command line run inside the test."""

from __future__ import annotations

import io
import json
import shutil
import string
from pathlib import Path

import pytest

from msrnn.cli import main
from tests.helpers.characters import character_model, character_tokenizer
from tests.helpers.command import Ran, Run


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as `--model` takes it."""
    path = tmp_path_factory.mktemp("model")
    character_model().save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def short(folder: Path, tmp_path: Path) -> Path:
    """The same model, with a training length of 200 tokens in its config."""
    path = shutil.copytree(folder, tmp_path / "short")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 200}))
    return path


@pytest.fixture(autouse=True)
def uncollected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip garbage collection between the cells of evaluations: it takes longer than these tests."""
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


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Three texts of which one is shorter than a chunk, and the others have two chunks and a rest each."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, length in {"one": 70, "two": 66, "short": 31}.items():
        (folder / f"{name}.txt").write_text(
            "".join(string.ascii_lowercase[(i * i + length) % 26] for i in range(length))
        )
    return folder


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take most of the time."""
    monkeypatch.setattr("msrnn.evaluation.report.has_matplotlib", lambda: False)
