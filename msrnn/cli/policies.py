from __future__ import annotations

from rich.console import Console
from rich.table import Table

from msrnn.policy import FULL, MEANINGS, NAMES


def policies() -> None:
    """The policies by name: which state leaves when a layer holds more than its size.

    Examples:
        msrnn policies
        msrnn generate "Once upon a time" --policy h2o --size 128
        msrnn generate "Once upon a time" --policy window+4 --size 128
        msrnn generate "Once upon a time" --policy decay=0.9,value=1
    """
    table = Table(title="The least important state that is not protected leaves")
    for column in ("policy", "decay", "per", "first", "recent", "value", "which state leaves"):
        table.add_column(column, no_wrap=column == "policy")
    table.add_row(FULL, "", "", "", "", "", "none: the unmodified model, whose state grows")
    for name, policy in NAMES.items():
        decay = "none" if policy.decay is None else f"{policy.decay:g}"
        recent = f"{policy.recent:.0%}" if isinstance(policy.recent, float) else str(policy.recent)
        table.add_row(name, decay, policy.per, str(policy.first), recent, "yes" if policy.value else "", MEANINGS[name])
    table.add_row("NAME+I", "", "", "I", "", "", "as NAME, but never the first I tokens: window+4, tova+4, …")
    table.add_row("NAME+I~H", "", "", "I", "", "", "as NAME+I, and all that is not among the last H: echo+1~2048, …")
    console = Console()
    console.print(table)
    console.print("importance ← decay · importance + attention of the newest token; decay none: the position itself")
    console.print("recent: so many tokens, or a share of the size; value: importance counts times the value's norm")
