"""States that go on where a run was stopped: one file for each batch of texts, in a folder beside the store."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from msrnn.core.state import MultiState


class Carried:
    """The states of one batch, by how many tokens of each text are done. Without a folder, none is kept."""

    def __init__(self, folder: Path | None, whose: Any) -> None:
        self.folder = folder
        self.name = hashlib.sha256(json.dumps(whose, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def files(self) -> dict[int, Path]:
        found = self.folder.glob(f"{self.name}-*.safetensors") if self.folder else []
        return {int(path.stem.rpartition("-")[2]): path for path in found}

    def save(self, state: MultiState, done: int) -> None:
        if self.folder:
            self.folder.mkdir(exist_ok=True)
            state.save(self.folder / f"{self.name}-{done}.safetensors")

    def forget(self, but: int | None = None) -> None:
        """All but one, which is what the rows that were written last count on."""
        for done, path in self.files.items():
            if done != but:
                path.unlink()
        if self.folder and self.folder.exists() and not any(self.folder.iterdir()):
            self.folder.rmdir()
