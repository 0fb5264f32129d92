"""The check that vLLM continues a request where its page is. It catches uses of a page that nobody has thought of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NO_PAGE = 0  # vLLM's null block, which padding has


class PageCheck:
    """Counts the tokens that each page has read.

    A page may begin anew, but it cannot go back, as speculative decoding would, or begin later, as a cached prefix
    would.
    """

    def __init__(self) -> None:
        self._read: dict[int, int] = {}

    def follow(self, pages: Sequence[int], begins: Sequence[int], ends: Sequence[int]) -> None:
        """Each page reads the tokens of its request from `begin` on, up to `end`."""
        for page, begin, end in zip(pages, begins, ends, strict=True):
            before = self._read.get(page, 0)
            if page == NO_PAGE or begin == end:
                continue
            if begin not in (0, before):
                raise RuntimeError(
                    f"page {page} has read {before} tokens, and vLLM continues with token {begin}: a bounded state "
                    "cannot go back or skip tokens. Please report which option of vLLM was used"
                )
            self._read[page] = end


class LaterPageCheck:
    """The same for page numbers that are on a GPU. A step is checked when the next one begins, without waiting."""

    def __init__(self, most: int, device: torch.device) -> None:
        self._check = PageCheck()
        self._pages = torch.zeros(most, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._arrived = torch.cuda.Event() if device.type == "cuda" else None
        self._pending: tuple[Sequence[int], Sequence[int]] | None = None

    def follow(self, pages: Tensor, begins: Sequence[int], ends: Sequence[int]) -> None:
        self.settle()
        self._pages[: len(begins)].copy_(pages, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        self._pending = begins, ends

    def settle(self) -> None:
        """Check the last step now."""
        if self._pending is not None:
            begins, ends = self._pending
            self._pending = None
            if self._arrived is not None:
                self._arrived.synchronize()
            self._check.follow(self._pages[: len(begins)].tolist(), begins, ends)
