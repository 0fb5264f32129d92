"""docs/models.md from the families themselves: `python -m tests.helpers.models_page` writes it."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import transformers
from transformers.utils import logging

from tests.helpers.model_families import CLASSES, WORKS, Family, family
from tests.helpers.small_configs import NAMES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TITLE = """# Model families

What msrnn does with each decoder of transformers {version}. `make models` writes this page, and the tests compare every
row with a fresh try. A row is about a tiny random model of the family, on text.

**Works** means that all of this holds to rounding:

- At a size that is not reached, the logits are those of the unmodified model (`eager` attention): for a text in one
  read, token by token, and in a batch with left padding.
- At a size that is reached, under `tova`, a text in one read gives the logits of the same text token by token, and the
  same tokens are held.

What does not work is refused with the reason, before anything is read. A family that is not listed is inspected when it
is wrapped, like any other, and may work.
"""
HEADER = "| family | model | `MultiStateRNN` | `MultiStateCache` |\n|---|---|---|---|\n"
NOT_TRIED, SAME = "Not tried", "the same"


def sections(rows: list[Family]) -> dict[str, list[Family]]:
    tried = [row for row in rows if not row.not_tried]
    works = [{verdict == WORKS for verdict in (row.rnn, row.cache)} for row in tried]
    both, none = ([row for row, found in zip(tried, works, strict=True) if found == {kind}] for kind in (True, False))
    return {
        "Works": both,
        "Works in one way": [row for row in tried if row.is_sound and row not in both + none],
        "Refused": [row for row in none if row.is_sound],
        "Wrong": [row for row in tried if not row.is_sound],
        NOT_TRIED: [row for row in rows if row.not_tried],
    }


def render(rows: list[Family], version: str) -> str:
    text = TITLE.format(version=version)
    for title, part in sections(rows).items():
        if not part:
            continue
        text += f"\n## {title}: {len(part)}\n\n"
        if title == NOT_TRIED:
            text += "| family | model | why |\n|---|---|---|\n"
            text += "".join(f"| {row.name} | {row.model} | {row.not_tried} |\n" for row in part)
        else:
            text += HEADER + "".join(f"| {' | '.join(_cells(row))} |\n" for row in part)
    return text


def _cells(row: Family) -> tuple[str, ...]:
    """A reason that holds for both is written once."""
    return (*row[:3], SAME if row.cache == row.rnn != WORKS else row.cache)


def parse(text: str) -> tuple[list[Family], str]:
    """The rows of a page, by name, and its version of transformers."""
    version = text.partition("decoder of transformers ")[2].partition(". `make")[0]
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and cells[0] in CLASSES:
            tried = [cells[2] if cell == SAME else cell for cell in cells]
            rows.append(Family(*tried) if len(cells) == 4 else Family(cells[0], cells[1], not_tried=cells[2]))
    return sorted(rows), version


def main() -> None:
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    rows = []
    for name in NAMES:
        rows.append(family(name, say))
        if not rows[-1].is_sound:
            say(f"{name}: accepted, and not exact: {rows[-1].rnn} / {rows[-1].cache}")
    PAGE.write_text(render(rows, transformers.__version__))
    say(f"{PAGE}: {', '.join(f'{title} {len(part)}' for title, part in sections(rows).items())}")


if __name__ == "__main__":
    main()
