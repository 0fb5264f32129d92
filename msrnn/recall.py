"""Recall: every KV row goes to an archive, and the rows that a query asks for come back as guests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from msrnn.checks import check_choice, check_count, check_folder
from msrnn.errors import UsageError

HOST, DEVICE = "host", "device"  # where an archive can be; anything else is a folder
AUTO, EXACT, INT8 = "auto", "exact", "int8"  # how an archive is searched


@dataclass(frozen=True)
class Recall:
    """What a layer archives, and how many rows it recalls."""

    rows: int  # guests: recalled rows of each KV head
    every: int = 1  # tokens that share their guests, while generating and in a question
    archive: str = HOST  # the host's memory, the model's device, or a folder for memory-mapped files
    state_dtype: str | None = None  # "int8" or "fp8": archived rows are quantized; None: they are as the state's rows
    search: str = AUTO  # by the archived keys, or by 8-bit copies on the model's device; auto: these if a GPU searches
    limit: int | None = None  # bytes of a sequence's archive in all layers; the oldest rows are dropped beyond

    def __post_init__(self) -> None:
        check_count("recall", self.rows, of="KV rows")
        check_count("recall_every", self.every, of="tokens")
        check_choice("search", self.search, (AUTO, EXACT, INT8))
        if not isinstance(self.archive, str) or not self.archive:
            raise UsageError(f"must be {HOST!r}, {DEVICE!r} or a folder", name="archive", value=self.archive)
        if self.folder is not None:
            check_folder("archive", self.folder)
        if self.limit is not None:
            check_count("archive_bytes", self.limit, of="bytes")

    @property
    def name(self) -> str:
        """What a state must have in common with the options that continue it."""
        return f"{self.rows}:{self.state_dtype}" if self.state_dtype else str(self.rows)

    @property
    def folder(self) -> Path | None:
        """The folder of memory-mapped files; None: the archive is in memory."""
        return None if self.archive in (HOST, DEVICE) else Path(self.archive)
