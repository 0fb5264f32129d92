"""The options of recall: evicted KV rows are archived, and some come back when a token asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from typer import Option

from msrnn.hf.model_options import ModelOptions

if TYPE_CHECKING:
    from msrnn.evaluation.recalled import Recalled

_RECALL = (
    "KV rows that come back from an archive of all tokens, for each token of a question or an answer; 0 archives "
    "nothing."
)
RecallRows = Annotated[int, Option("--recall", help=_RECALL)]
SavedRecall = Annotated[int | None, Option("--recall", help=_RECALL, show_default="the saved state's, or 0")]
RecallEvery = Annotated[int, Option(help="With --recall: tokens that share their recalled rows.")]
RecallWhileReading = Annotated[
    int | None,
    Option(
        help="With --recall: also recall while a long text is read, once for this many tokens.",
        show_default="only in the question and the answer",
    ),
]
Archive = Annotated[
    str,
    Option(
        help="With --recall: where the archive is: host (main memory), device (with the model), or a folder for "
        "memory-mapped files."
    ),
]
ArchiveBytes = Annotated[
    int | None,
    Option(
        help="With --recall: most bytes of the archive of a text; the oldest tokens are dropped first.",
        show_default="no limit",
    ),
]
Search = Annotated[
    str,
    Option(
        help="With --recall: search the archive by its keys (exact), or by 8-bit copies of them on the device (int8); "
        "auto: int8 where kernels search, on a GPU."
    ),
]


@dataclass(frozen=True)
class RecallOptions:
    """The group of options of an evaluation whose bounded policies may recall."""

    recall: RecallRows = 0
    recall_every: RecallEvery = 1
    recall_while_reading: RecallWhileReading = None

    def __post_init__(self) -> None:
        ModelOptions(recall=self.recall, recall_every=self.recall_every, recall_while_reading=self.recall_while_reading)

    @property
    def of_texts(self) -> RecallOptions:
        """The options of a text without a question: each of its tokens recalls."""
        return replace(self, recall_every=self.recall_while_reading or self.recall_every, recall_while_reading=None)

    @property
    def recalled(self) -> Recalled | None:
        """The recall of each bounded row; None: none."""
        from msrnn.evaluation.recalled import Recalled

        return Recalled(self.recall, self.recall_every, self.recall_while_reading) if self.recall else None

    def add_to(self, policies: Sequence[str]) -> list[str]:
        """The rows of a table: these policies, with this recall where they evict tokens."""
        from msrnn.evaluation.cells import add_recall

        return add_recall(policies, self.recalled) if self.recalled else [*policies]
