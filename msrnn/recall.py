"""Recall: every KV row goes to an archive, and the rows that a query asks for come back as guests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from msrnn.checks import check_choice, check_count, check_folder
from msrnn.errors import UsageError

HOST, DEVICE = "host", "device"  # where an archive can be; anything else is a folder
AUTO, EXACT, INT8 = "auto", "exact", "int8"  # how an archive is searched
QUESTION = 64  # the last tokens of a prompt, which recall as an answer does
SEGMENT = 1024  # tokens of a whole segment of an archive, which are dropped together


@dataclass(frozen=True)
class Recall:
    """What a layer archives, and how many rows it recalls.

    A state keeps its archive where it was made. To move it, or to use another `search` or `limit`, convert the state.
    """

    rows: int  # guests: recalled rows of each KV head
    every: int = 1  # tokens that share their guests, while generating and in a question
    archive: str = HOST  # the host's memory, the model's device, or a folder for memory-mapped files
    state_dtype: str | None = None  # "int8" or "fp8": archived rows are quantized; None: they are as the state's rows
    search: str = AUTO  # by the archived keys, or by 8-bit copies on the model's device; auto: these if a GPU searches
    limit: int | None = None  # bytes of a sequence's archive, in all layers and processes; then the oldest rows go

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


@dataclass(frozen=True)
class Recalling:
    """When the tokens of a forward pass recall: in blocks of `every` tokens, which begin at multiples of it."""

    every: int
    starts: bool  # whether the first token begins a block wherever it is; the caller lets later blocks begin right

    def end_of_block(self, begin: int, end: int, last: int) -> int:
        """Where a read of positions from `begin` to `end` may end without dividing a block, at `last` at the latest.

        A block is read at once: all of its queries choose what it recalls. So one that is longer is read whole.
        """
        if end >= last:
            return last
        whole = end // self.every * self.every
        return whole if whole > begin else min(last, (begin // self.every + 1) * self.every)


@dataclass(frozen=True)
class PromptRecall:
    """Which tokens of a prompt recall: the last ones, its question, as an answer does; the others while it is read."""

    recall: Recall
    while_reading: int | None  # tokens of a block before the question; None: these recall nothing

    @property
    def answer(self) -> Recalling:
        """How the tokens of an answer recall."""
        return Recalling(self.recall.every, starts=False)

    def parts(self, tokens: int) -> list[tuple[int, Recalling | None]]:
        """The parts of a prompt, which has this number of tokens: where each ends, and how its tokens recall."""
        before = max(0, tokens - QUESTION)
        reading = None if self.while_reading is None else Recalling(self.while_reading, starts=True)
        return [*([(before, reading)] if before else []), (tokens, Recalling(self.recall.every, starts=True))]

    def find_shared_length(self, length: int, tokens: int) -> int:
        """The most of the first `length` tokens whose state all prompts that begin with them have in common.

        The whole prompt has `tokens` tokens. Its question is not shared: in a longer prompt the same tokens are no
        question. A block that is not whole is not shared either.
        """
        grain = self.while_reading or QUESTION  # coarse, so that prompts with other questions share prefixes
        return max(0, min(length, tokens - QUESTION)) // grain * grain

    @property
    def name(self) -> str:
        """What the prefixes of prompts must have in common, besides the fingerprint of their states."""
        return f"{self.while_reading}:{self.recall.search}:{self.recall.limit}"

    @property
    def shown(self) -> dict[str, int | str | None]:
        """The options of recall for users of a server, who need not know the name of a folder."""
        place = self.recall.archive if self.recall.folder is None else "folder"
        return {
            "rows": self.recall.rows,
            "every": self.recall.every,
            "while_reading": self.while_reading,
            "archive": place,
            "archive_bytes": self.recall.limit,
            "search": self.recall.search,
        }


def count_dropped(tokens: int, most: int | None) -> int:
    """The first of these tokens that an archive of at most `most` has dropped: whole segments. None: it has all."""
    return 0 if most is None else -(-max(0, tokens - most) // SEGMENT) * SEGMENT
