"""Compiled loops where numba finds no place for its cache, on a copy of the package.

Loops are compiled in processes of their own; where only the folder is of interest, the copy of its module is loaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

import msrnn

STEP = """
import torch
from msrnn.backends import resolve_backend
from msrnn.layer import attend
from msrnn.bound import Bound
from msrnn.policy import Policy
from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape, Slots
slots = Slots(1, LayerShape(1, 1, 4, 4, torch.float32, torch.device("cpu")), Bound(Policy.parse("tova"), 2))
row = torch.ones(1, 1, 1, 4)
position = slots.advance(1, None)
assert torch.equal(attend(slots, row, row, row, position, Scoring(0.5), 128, resolve_backend("numba", row.device)), row)
"""
SHORT = """
import numpy as np
from msrnn.backends.numba.rows import weigh
row = np.ones(4, np.float32)
weigh(row, row, row)
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A package that nothing can be written into, whoever tries: where its caches belong, there are files."""
    package = Path(msrnn.__file__).parent
    shutil.copytree(package, tmp_path / "site" / "msrnn", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in [p for p in (tmp_path / "site").rglob("*") if p.is_dir()]:
        (folder / "__pycache__").write_text("")
    return tmp_path / "site"


def run(site: Path, code: str = SHORT, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    environment = {"HOME": os.devnull, **environment, "PYTHONPATH": str(site)}
    code += "from msrnn.backends.numba.jit import cache_folder\nprint(cache_folder())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=kept | environment, cwd=site, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done


def test_another_folder_is_found(installed: Path, tmp_path: Path) -> None:
    done = run(installed, TMPDIR=str(tmp_path))
    assert str(tmp_path / "msrnn-") in done.stdout
    assert list(tmp_path.glob("msrnn-*/numba-*/**/*.nbi")), "what was compiled is kept"
    assert "NUMBA_CACHE_DIR" not in done.stderr


@pytest.mark.slow
def test_a_folder_of_the_users_choice(installed: Path, tmp_path: Path) -> None:
    run(installed, NUMBA_CACHE_DIR=str(tmp_path / "mine"))
    assert list((tmp_path / "mine").glob("numba-*/**/*.nbi"))


@pytest.mark.slow
def test_without_any_folder_one_warning(installed: Path, tmp_path: Path) -> None:
    (tmp_path / f"msrnn-{os.getuid()}").write_text("")  # in the way
    done = run(installed, STEP, TMPDIR=str(tmp_path), NUMBA_OPT="0")
    assert done.stderr.count("set NUMBA_CACHE_DIR to a folder that can be written") == 1
    assert done.stdout.strip() == "None"


def load(site: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The copy's own module of the folder, in this process, where HOME is as in `run`."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", os.devnull)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    spec = spec_from_file_location("copied_jit", site / "msrnn" / "backends" / "numba" / "jit.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.config, "CACHE_DIR", "")
    return module


def test_a_temporary_folder_that_others_can_write_is_not_trusted(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / f"msrnn-{os.getuid()}"
    shared.mkdir()
    shared.chmod(0o777)
    jit = load(installed, tmp_path, monkeypatch)
    with pytest.warns(UserWarning, match="set NUMBA_CACHE_DIR to a folder that can be written"):
        compiled = jit.compile_loop()(lambda row: row + 1)
    assert jit.cache_folder() is None
    assert compiled(1) == 2
    assert list(shared.iterdir()) == []
    shared.chmod(0o700)
    jit.cache_folder.cache_clear()
    assert jit.cache_folder().parent == shared


def test_a_change_in_another_file_makes_a_cache_stale(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `decode` inlines from `rows` is in the cache of `decode`, whose own file did not change."""
    found = []
    for name in ("rows.py", "rope.py"):
        jit = load(installed, tmp_path, monkeypatch)
        found.append(jit.cache_folder())
        with (jit.HERE / name).open("a") as source:
            source.write("# changed\n")
    found.append(load(installed, tmp_path, monkeypatch).cache_folder())
    assert [folder.parent for folder in found] == [tmp_path / f"msrnn-{os.getuid()}"] * 3
    assert len(set(found)) == 3
