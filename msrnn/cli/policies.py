from __future__ import annotations

from rich.console import Console
from rich.table import Table

from msrnn import budget
from msrnn.cli.terminal import show_text
from msrnn.policy import FULL, MEANINGS, NAMES

TITLE = "A full layer evicts the least important token that is not protected"
COLUMNS = ("policy", "decay", "per", "first", "recent", "value", "which token is evicted")
LEAST_WIDTH = 80  # characters that the table needs


def policies() -> None:
    """List the eviction policies: which token a full layer evicts.

    Examples:
        msrnn policies
        msrnn generate "Once upon a time" --policy h2o --size 128
        msrnn generate "Once upon a time" --policy window+4 --size 128
        msrnn generate "Once upon a time" --policy decay=0.9,value_norm=1
    """
    if Console().width >= LEAST_WIDTH:
        show_as_table()
    else:
        show_as_list()
    show_text("importance ← decay · importance + attention of the newest token; decay none: importance is the position")
    show_text("first, recent: tokens that are never evicted; recent may be a share of the size")
    show_text("value: importance is multiplied by the norm of the value vector")
    show_text("FILE: networks that were trained for one model, and multiply that norm by what they say of the row")
    for name, meaning in budget.MEANINGS.items():
        show_text(f"budget {name}: {meaning}")


def rows() -> list[list[str]]:
    lines = [[FULL.name, "", "", "", "", "", "none: the unmodified model, whose KV cache grows"]]
    for name, policy in NAMES.items():
        decay = "none" if policy.decay is None else f"{policy.decay:g}"
        recent = f"{policy.recent:.0%}" if isinstance(policy.recent, float) else str(policy.recent)
        value = "yes" if policy.value_norm else ""
        lines.append([name, decay, policy.per, str(policy.first), recent, value, MEANINGS[name]])
    lines.append(["NAME+I", "", "", "I", "", "", "as NAME, but never the first I tokens: window+4, tova+4, …"])
    lines.append(["NAME+I~H", "", "", "I", "", "", "as NAME+I, and every token not among the last H: echo+1~2048, …"])
    lines.append(["NAME@FILE", "", "", "", "", "yes", "as NAME, with learned row weights: echo@weights.safetensors, …"])
    budgets = ", ".join(budget.NAMES)
    lines.append(["NAME:BUDGET", "", "", "", "", "", f"as NAME; layers have different sizes: {budgets}, or a file"])
    return lines


def show_as_table() -> None:
    table = Table(title=TITLE)
    for column in COLUMNS:
        table.add_column(column, no_wrap=column == COLUMNS[0])
    for row in rows():
        table.add_row(*row)
    Console().print(table)


def show_as_list() -> None:
    """Print a paragraph for each policy, for narrow terminals."""
    show_text(TITLE)
    for name, *numbers, meaning in rows():
        given = [f"{column} {value}" for column, value in zip(COLUMNS[1:-1], numbers, strict=True) if value]
        show_text(f"\n{name}")
        if given:
            show_text(", ".join(given), indent=2)
        show_text(meaning, indent=2)
    print()
