"""docs/models.md is what the families do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from torch import tensor

from tests.helpers.model_families import (
    CLASSES,
    WORKS,
    WRONG,
    Family,
    WrongAnswerError,
    check_close,
    check_forgets,
    family,
)
from tests.helpers.models_page import PAGE, parse, render
from tests.helpers.small_configs import NAMES

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
ROWS, VERSION = parse(PAGE.read_text())
LISTED = {row.name: row for row in ROWS}
# Families that work and differ in kind: positions, windows, sinks, norms, experts, caches of other layers, images.
KINDS = {"bert", "gemma2", "gemma4_text", "glm", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "granitemoehybrid"}
KINDS |= {"hrm_text", "lfm2", "llama", "llava", "mixtral", "modernbert-decoder", "olmo2", "opt", "qwen2_vl"}
KINDS |= {"qwen3_next", "smollm3", "stablelm", "whisper"}


def ordered() -> Iterator[object]:
    """Every family; slow are those that another one stands for: of its kind, or refused for the same reason."""
    reasons = {(WORKS, WORKS, "")}
    for name in NAMES:
        row = LISTED.get(name)
        is_new = row is None or row[2:] not in reasons
        yield name if is_new or name in KINDS else pytest.param(name, marks=pytest.mark.slow)
        if row is not None:
            reasons.add(row[2:])


@pytest.mark.skipif(transformers.__version__ != VERSION, reason=f"docs/models.md is about transformers {VERSION}")
@pytest.mark.parametrize("name", [*ordered()])
def test_the_row_of_a_family_is_what_it_does(name: str) -> None:
    assert family(name) == LISTED.get(name), "run `make models` and look at what has changed"


def test_no_family_is_accepted_and_wrong() -> None:
    assert [row.name for row in ROWS if not row.is_sound] == []


def test_the_page_is_what_is_generated_from_its_rows() -> None:
    assert render(ROWS, VERSION) == PAGE.read_text()
    (pinned,) = re.findall(r"^transformers==(.*)$", CONSTRAINTS.read_text(), flags=re.MULTILINE)
    assert pinned == VERSION, "run `make models`"


@pytest.mark.skipif(transformers.__version__ != VERSION, reason=f"docs/models.md is about transformers {VERSION}")
def test_every_family_is_listed_once() -> None:
    assert [row.name for row in ROWS] == NAMES


def test_rows_are_read_as_they_were_written() -> None:
    rows = [
        Family("bart", CLASSES["bart"], "counts, by itself", "works"),
        Family("gpt2", CLASSES["gpt2"], "works", "works"),
        Family("mamba", CLASSES["mamba"], "has no attention", "has no attention"),
        Family("moshi", CLASSES["moshi"], f"{WRONG}read", f"{WRONG}stepped"),
        Family("musicgen", CLASSES["musicgen"], not_tried="no text"),
    ]
    text = render(rows, "9.9.9")
    assert parse(text) == (rows, "9.9.9")
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == [
        *("Works: 1", "Works in one way: 1", "Refused: 1", "Wrong: 1", "Not tried: 1")
    ]
    assert [row.is_sound for row in rows] == [True, True, True, False, True]


def test_differences_are_seen() -> None:
    logits = tensor([[1.0, -2.0, -3.4e38]])
    check_close(logits * (1 + 1e-6), logits, "rounded")
    check_forgets(logits * 1.01, logits)
    for found in (logits * 1.01, logits * float("nan")):
        with pytest.raises(WrongAnswerError, match="read: off by"):
            check_close(found, logits, "read")
    with pytest.raises(WrongAnswerError, match="nothing is forgotten"):
        check_forgets(logits, logits)
