"""The options of recall: evicted KV rows are archived, and some come back when a token asks for them."""

from __future__ import annotations

from typing import Annotated

from typer import Option

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
