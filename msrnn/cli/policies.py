from __future__ import annotations

from rich.console import Console
from rich.table import Table

from msrnn.cli.tables import show_text
from msrnn.policy import FULL, MEANINGS, NAMES

TITLE = "The least important state that is not protected leaves"
COLUMNS = ("policy", "decay", "per", "first", "recent", "value", "which state leaves")
WIDE = 80  # columns from which on a table can be read


def policies() -> None:
    """The policies by name: which state leaves when a layer holds more than its size.

    Examples:
        msrnn policies
        msrnn generate "Once upon a time" --policy h2o --size 128
        msrnn generate "Once upon a time" --policy window+4 --size 128
        msrnn generate "Once upon a time" --policy decay=0.9,value_norm=1
    """
    if Console().width >= WIDE:
        show_as_table()
    else:
        show_as_list()
    show_text("importance ← decay · importance + attention of the newest token; decay none: the position itself")
    show_text("recent: a number of tokens, or a share of the size; value: importance counts times the value's norm")


def rows() -> list[list[str]]:
    found = [[FULL, "", "", "", "", "", "none: the unmodified model, whose state grows"]]
    for name, policy in NAMES.items():
        decay = "none" if policy.decay is None else f"{policy.decay:g}"
        recent = f"{policy.recent:.0%}" if isinstance(policy.recent, float) else str(policy.recent)
        value = "yes" if policy.value_norm else ""
        found.append([name, decay, policy.per, str(policy.first), recent, value, MEANINGS[name]])
    found.append(["NAME+I", "", "", "I", "", "", "as NAME, but never the first I tokens: window+4, tova+4, …"])
    found.append(["NAME+I~H", "", "", "I", "", "", "as NAME+I, and all that is not among the last H: echo+1~2048, …"])
    return found


def show_as_table() -> None:
    table = Table(title=TITLE)
    for column in COLUMNS:
        table.add_column(column, no_wrap=column == COLUMNS[0])
    for row in rows():
        table.add_row(*row)
    Console().print(table)


def show_as_list() -> None:
    """A paragraph for each policy."""
    show_text(TITLE)
    for name, *numbers, meaning in rows():
        given = [f"{column} {value}" for column, value in zip(COLUMNS[1:-1], numbers, strict=True) if value]
        show_text(f"\n{name}")
        if given:
            show_text(", ".join(given), indent=2)
        show_text(meaning, indent=2)
    print()
