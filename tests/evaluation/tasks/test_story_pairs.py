from __future__ import annotations

from typing import Any

import pytest

from msrnn.evaluation.cells import Cell
from msrnn.evaluation.store import Store
from msrnn.evaluation.tasks.story_pairs import Pair, pairs

SMALL, LARGE = Cell("tova", 8), Cell("tova", 16)


def test_the_prompt_is_that_of_the_paper() -> None:
    first, swapped = (Pair(SMALL, 1, "bounded 1", "full 1").prompt(order) for order in (False, True))
    assert first.startswith("Help me decide which response is better given the prompt:\n### Instruction:\nWrite a very")
    line = "-" * 24
    assert (
        f"(the responses are separated by '{line}'):\nResponse (A):\nbounded 1\n{line}\nResponse (B):\nfull 1\n"
        in first
    )
    assert f"Response (A):\nfull 1\n{line}\nResponse (B):\nbounded 1\n" in swapped
    assert first.endswith("please select one and only one option, be as concisely as you can, using a single phrase.")


def story_row(policy: str, size: int | None, seed: int, length: int, **more: Any) -> dict[str, Any]:
    shared = {"fingerprint": "f", "dtype": "float32", "prompt": "p", "most": 99, "temperature": 1.0, "model": "tiny"}
    story = {"ids": [1] * length, "story": f"{policy} {seed}", "ended": True, "prompt_tokens": 4}
    return {**shared, "policy": policy, "size": size, "seed": seed, **story, **more}


def test_pairs_that_forgot_nothing_are_dropped() -> None:
    store = Store(None)
    store.records = [
        story_row("full", None, 0, 90, temperature=0.5),
        *(story_row("full", None, seed, 20) for seed in (0, 1, 2)),
        *(story_row("tova", 8, seed, length) for seed, length in ((0, 4), (1, 5), (2, 30), (3, 30))),
        *(story_row("tova", 16, seed, 10) for seed in (0, 1)),
    ]
    found = pairs(store)
    assert [(pair.cell, pair.seed, pair.bounded, pair.full) for pair in found.pairs] == [
        (SMALL, 1, "tova 1", "full 1"),
        (SMALL, 2, "tova 2", "full 2"),
    ]
    assert found.dropped == {SMALL: 1, LARGE: 2}
    old, new = store.records, [{**row, "sampler": "engine"} for row in store.records]
    for rows in ([*old, new[3], new[6]], [*new, old[3], old[6]]):
        store.records = rows
        assert [pair.seed for pair in pairs(store).pairs] == [2], "of the last row's sampler"
    for rows, reason in (([], "no stories"), (store.records[:1], "by the same seed")):
        store.records = rows
        with pytest.raises(ValueError, match=reason):
            pairs(store)
