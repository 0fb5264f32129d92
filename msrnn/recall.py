"""Recall: every KV row goes to an archive, and the rows that a query asks for come back as guests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from msrnn.checks import check_choice, check_count, check_folder
from msrnn.errors import UsageError

HOST, DEVICE = "host", "device"  # where an archive can be; anything else is a folder
EXACT, DIGEST = "exact", "digest"  # how an archive is searched
PAGE = 16  # tokens of a page: the search by digests ranks pages


@dataclass(frozen=True)
class Recall:
    """What a layer archives, and how many rows it recalls."""

    rows: int  # guests: recalled rows of each KV head
    every: int = 1  # tokens that share their guests, while generating and in a question
    archive: str = HOST  # the host's memory, the model's device, or a folder for memory-mapped files
    state_dtype: str | None = None  # "int8" or "fp8": archived rows are quantized; None: they are as the state's rows
    search: str = EXACT  # by all archived keys, or by digests of pages: the least and the largest numbers of their keys
    limit: int | None = None  # bytes of a sequence's archive in all layers; the oldest rows are dropped beyond

    def __post_init__(self) -> None:
        check_count("recall", self.rows, of="KV rows")
        check_count("recall_every", self.every, of="tokens")
        check_choice("search", self.search, (EXACT, DIGEST))
        if self.search == DIGEST and self.rows % PAGE:
            raise UsageError(f"must be a multiple of {PAGE}, whole pages", name="recall", value=self.rows)
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
    def pages(self) -> int:
        """Pages that are recalled by digests."""
        return self.rows // PAGE

    @property
    def folder(self) -> Path | None:
        """The folder of memory-mapped files; None: the archive is in memory."""
        return None if self.archive in (HOST, DEVICE) else Path(self.archive)
