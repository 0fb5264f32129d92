"""The folder of an unfinished training: what was collected and trained so far."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msrnn.core.atomic import make_private_folder, write_atomically
from msrnn.core.device_memory import gigabytes
from msrnn.errors import DoesNotFitError, FileError

_IDENTITY = "training.json"


class WorkFolder:
    """A folder beside the file to write. Its content belongs to one training: a model, texts and options."""

    def __init__(self, out: Path, identity: Mapping[str, Any], restart: bool = False) -> None:
        """Open the folder, or make it. With `restart`, what it has is removed first."""
        self.path = out.with_name(f"{out.name}.work")
        self._text = json.dumps(identity, sort_keys=True, indent=1)
        if restart and (self.path / _IDENTITY).is_file():
            self.remove()
        if self.path.exists() and not self._is_mine():
            raise FileError(
                "the unfinished work of another training",
                self.path,
                advice="repeat its command, add --force to start anew, or name another file to write",
            )
        self.resumes = self.path.is_dir()
        make_private_folder(self.path)
        write_atomically(self.path / _IDENTITY, lambda to: _write(to, self._text))

    def _is_mine(self) -> bool:
        try:
            return (self.path / _IDENTITY).read_text() == self._text
        except (OSError, UnicodeDecodeError):
            return not any(self.path.iterdir()) if self.path.is_dir() else False

    def file(self, name: str) -> Path:
        return self.path / name

    def check_space(self, needed: int) -> None:
        """Refuse more bytes than the disk has free."""
        free = shutil.disk_usage(self.path).free
        if needed > free:
            raise DoesNotFitError(
                f"the decisions to train on take {gigabytes(needed)} on the disk of {self.path}, and "
                f"{gigabytes(free)} is free: use fewer chunks or moments, or write to another disk"
            )

    def remove(self) -> None:
        """Remove the folder with all it has."""
        shutil.rmtree(self.path, ignore_errors=True)


def digest_of(*parts: bytes) -> str:
    """SHA-256."""
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _write(path: Path, text: str) -> None:
    path.write_text(text)
