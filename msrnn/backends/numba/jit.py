"""numba's compiler, and the folder of its cache.

With `cache=True`, numba raises where it finds no writable folder, and it checks only a function's own file for changes.
Here the folder is named after the contents of all source files of the loops, and several locations are tried.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit
from numba.core import config as numba_config

config: Any = numba_config  # its attributes are made when it is imported
HERE = Path(__file__).parent
CORE = HERE.parent.parent / "core"
SOURCES = (*sorted(HERE.glob("*.py")), *(CORE / name for name in ("rope.py", "slots.py", "weight_network.py")))


def compile_loop(**options: Any) -> Callable[[Any], Any]:
    """`numba.njit` without the GIL, cached where that is possible; options as of njit."""

    def decorate(function: Any) -> Any:
        folder, before = cache_folder(), config.CACHE_DIR
        if folder is None:
            return njit(nogil=True, **options)(function)
        config.CACHE_DIR = str(folder)
        try:
            return njit(nogil=True, cache=True, **options)(function)
        finally:
            config.CACHE_DIR = before

    return decorate


@cache
def cache_folder() -> Path | None:
    """The first folder that can be written; None, with a warning, where there is none."""
    for base in _bases():
        folder = base / f"numba-{_digest()}"
        fresh = not folder.exists()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError:
            continue
        if fresh and base == HERE / "__pycache__":
            for stale in set(base.glob("numba-*")) - {folder}:
                shutil.rmtree(stale, ignore_errors=True)
        return folder
    warnings.warn(
        "no folder for compiled code can be written, so every process compiles its CPU loops again, which takes up to "
        "a minute: set NUMBA_CACHE_DIR to a folder that can be written",
        stacklevel=2,
    )
    return None


def _bases() -> Iterator[Path]:
    if config.CACHE_DIR:
        yield Path(config.CACHE_DIR)
        return
    yield HERE / "__pycache__"
    yield Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "msrnn"
    temporary = Path(tempfile.gettempdir()) / f"msrnn-{os.getuid() if hasattr(os, 'getuid') else os.getlogin()}"
    if _is_private(temporary):
        yield temporary


def _is_private(folder: Path) -> bool:
    """Create the folder if needed; whether only this user can write to it, since cached code will be executed."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return False
    owned = not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & 0o077)
    return stat.S_ISDIR(status.st_mode) and owned


@cache
def _digest() -> str:
    """A digest of all source files: a function that is inlined into another file is in that file's cache as well."""
    digest = hashlib.sha256()
    for path in SOURCES:
        digest.update(path.read_bytes() if path.exists() else path.name.encode())
    return digest.hexdigest()[:12]
