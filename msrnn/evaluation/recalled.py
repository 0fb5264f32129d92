"""Rows of a table that recall: their names say how many archived KV rows come back, as "echo + 256 recalled"."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from msrnn.checks import check_count
from msrnn.recall import DEVICE, Recall

_NAME = re.compile(
    r"(?P<policy>.+?) *\+ *(?P<rows>\d{1,9}) recalled( every (?P<every>\d{1,9}))?"
    r"(, every (?P<while_reading>\d{1,9}) while reading)?",
    re.IGNORECASE,
)


class Recalled(NamedTuple):
    """Recall as a part of a row's name, after the policy and its size."""

    rows: int
    every: int = 1
    while_reading: int | None = None

    def __str__(self) -> str:
        every = f" every {self.every}" if self.every > 1 else ""
        reading = f", every {self.while_reading} while reading" if self.while_reading else ""
        return f" + {self.rows} recalled{every}{reading}"

    def check(self) -> Recalled:
        """Refuse 0."""
        Recall(self.rows, self.every)
        if self.while_reading is not None:
            check_count("recall_while_reading", self.while_reading, of="tokens")
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `MultiStateRNN`.

        The archive is on the model's device, where it is searched fastest: the full model, which a table compares
        with, keeps as much there.
        """
        return {"recall": Recall(self.rows, self.every, DEVICE), "recall_while_reading": self.while_reading}


def split_name(name: str) -> tuple[str, Recalled | None]:
    """The name of a row without its recall, and the recall; None: it has none."""
    found = _NAME.fullmatch(name)
    if found is None:
        return name, None
    parts = found.groupdict()
    policy = parts.pop("policy")
    return policy, Recalled(**{name: int(digits) for name, digits in parts.items() if digits}).check()
