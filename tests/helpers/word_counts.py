"""Two texts of the evaluations' tests, a tokenizer of their characters, and records without what a run has cost."""

from __future__ import annotations

from tests.helpers.characters import character_tokenizer

TEXTS = {name: "".join(f"{name} has {i} words. " for i in range(20)) for name in ("one", "two")}
TOKENIZER = character_tokenizer()
COST = ("seconds", "text", "haystack", "model", "commit", "machine")  # may differ between two runs, or have other names


def without_cost(records: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{name: value for name, value in record.items() if name not in COST} for record in records]
