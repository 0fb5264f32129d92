from __future__ import annotations

from typing import Any

import pytest

from msrnn.errors import UsageError
from msrnn.evaluation.cells import (
    FULL_MODEL,
    Cell,
    Grid,
    add_recall,
    cell_of,
    check_lists,
    check_row,
    find_cells,
    grid,
    reference_policy,
    row_name,
)
from msrnn.evaluation.future import Future
from msrnn.evaluation.recalled import Recalled
from msrnn.policy import NAMES, Policy
from msrnn.recall import Recall
from msrnn.scored import ScoredPolicy
from msrnn.size import Size

TOVA, H2O, WINDOW = Cell("tova", 8), Cell("h2o", 8), Cell("window", 16)


def test_a_cell_and_the_model_that_computes_it() -> None:
    assert (TOVA.label, FULL_MODEL.label) == ("tova 8", "full")
    made = TOVA.options
    assert (made.keys(), made["policy"].name, made["size"].rows) == ({"policy", "size"}, "tova", 8)
    for unbounded in (FULL_MODEL, Cell("baseline", 8), Cell("truncated", 8)):
        assert (unbounded.options["policy"].name, unbounded.options["size"]) == ("full", None)


def test_a_row_that_recalls() -> None:
    """It is another row than the same policy without recall, in tables and in records."""
    cell = Cell("tova:upper + 4 recalled every 2, every 64 while reading", 8)
    assert cell.label == "tova:upper 8 + 4 recalled every 2, every 64 while reading"
    assert Cell("tova + 4 recalled", 8).label == "tova 8 + 4 recalled"
    assert (cell.keeps, Cell("tova + 4 recalled", 8).keeps) == (0, 8)
    assert cell.without_recall == cell.without_recall.without_recall == Cell("tova:upper", 8)
    assert {name: cell.options[name] for name in ("recall", "recall_while_reading")} == {
        "recall": Recall(4, 2, "device"),
        "recall_while_reading": 64,
    }
    assert cell.options["policy"] == TOVA.options["policy"]
    assert (cell.key["policy"], Cell("tova + 4 recalled", 8).key["numbers"]) == (cell.policy, TOVA.key["numbers"])
    table = grid(["tova", "TOVA+4 recalled every 1", "full"], [8, 100], 100)
    assert table.policies == ["tova", "tova + 4 recalled", "full"]
    assert table.at("tova + 4 recalled", 100) == FULL_MODEL  # nothing is evicted
    assert table.pairs_with("tova")[0] == (Cell("tova + 4 recalled", 8), TOVA)
    assert find_cells([cell.key, TOVA.key], cell_of) == [cell, TOVA]


def test_recall_is_added_to_rows_that_evict() -> None:
    policies: list[str | Policy] = ["Tova", Policy(decay=0.5), "full", "baseline", "tova + 9 recalled"]
    assert add_recall(policies, Recalled(4)) == [
        "tova + 4 recalled",
        f"{Policy(decay=0.5).name} + 4 recalled",
        "full",
        "baseline",
        "tova + 9 recalled",
    ]
    with pytest.raises(UsageError, match=r"full \+ 4 recalled.*evicts nothing"):
        row_name("full + 4 recalled")


def test_rows_that_a_model_can_compute() -> None:
    for policy in ("tova", "full", "tova + 4 recalled", NAMES["h2o"]):
        check_row(policy, 8)
    for name in ("truncated", "tovas", "tovas + 4 recalled", "full + 4 recalled", "tova + 0 recalled"):
        with pytest.raises(UsageError):
            check_row(name, 8)


def test_the_true_future_has_a_size_and_a_definition() -> None:
    cell = Cell("future", 8)
    assert (cell.label, cell.keeps, cell.future, TOVA.future) == ("future 8", 8, Future(8), None)
    assert cell.key == {
        "policy": "future",
        "numbers": {"version": 1, "ahead": 256, "recent": 0},
        "size": 8,
    }
    assert find_cells([cell.key, {**cell.key, "numbers": {"version": 0}}], cell_of) == [cell]
    assert find_cells([{**cell.key, "numbers": {"version": 0}}], cell_of) == []
    table = grid(["Future", "future", "full"], [8, 100], 100)
    assert (table.policies, table.cells) == (["future", "full"], [FULL_MODEL, cell])
    assert add_recall(["future"], Recalled(4)) == ["future"]
    for name in ("future:upper", "future+4", "future + 4 recalled", "futures"):
        with pytest.raises(UsageError, match="the true future has no budget, no protected tokens and no recall"):
            row_name(name)
    with pytest.raises(UsageError, match=r"policy='future': knows a text before it is read.*msrnn eval perplexity"):
        check_row("future", 8)


def test_what_keeps_a_whole_text() -> None:
    assert (TOVA.keeps, FULL_MODEL.keeps, Cell("baseline", 8).keeps) == (8, None, 8)
    assert Cell("tova:upper", 8).keeps == 0  # some layers have fewer KV rows


def test_a_name_whose_numbers_have_changed_is_another_result() -> None:
    record = dict(TOVA.key)
    assert cell_of(record) == TOVA
    changed = {**H2O.key, "numbers": TOVA.key["numbers"]}
    unknown = {"policy": "of-another-version", "numbers": None, "size": 8}
    assert find_cells([record, record, changed, unknown, FULL_MODEL.key], cell_of) == [TOVA, FULL_MODEL]


def test_a_table_has_each_cell_once_and_the_full_model_first() -> None:
    table = grid(["tova", "TOVA", "full"], [16, 8, 8, 100], 100)
    assert (table.policies, table.sizes) == (["tova", "full"], [8, 16, 100])
    assert table.cells == [FULL_MODEL, TOVA, Cell("tova", 16)]
    assert table.at("tova", 100) == FULL_MODEL  # nothing is evicted
    assert table.at("tova:upper", 100) == Cell("tova:upper", 100)
    assert table.header == ["policy", "8", "16", "100"]


def test_pairs_have_one_size() -> None:
    table = grid(["tova", "h2o", "full"], [8, 100], 100)
    assert table.find_comparable("tova") == ["h2o", "full"]
    assert table.pairs_with("tova") == [(H2O, TOVA), (FULL_MODEL, TOVA)]


def test_cells_of_earlier_runs_are_rows_below() -> None:
    table = grid(["tova"], [8], 100).extend([WINDOW])
    assert (table.policies, table.sizes) == (["tova", "window"], [8, 16])
    assert table.places == [("tova", 8), ("window", 16)]
    assert table.rows(["tova", "window"], lambda name, size: f"{name}{size}") == [
        ["tova", "tova8", None],
        ["window", None, "window16"],
    ]
    assert table.find_comparable("tova") == []
    assert table.pairs_with("tova") == []


def test_all_spellings_of_a_policy_are_one_row() -> None:
    assert (row_name("FULL"), row_name("Tova"), row_name("tova+0")) == ("full", "tova", "tova")
    with pytest.raises(UsageError, match="did you mean 'tova'"):
        row_name("tovas")


def test_a_policy_is_a_row_as_its_name_is() -> None:
    assert row_name(NAMES["h2o"]) == "h2o"
    assert grid([Policy(decay=0.5), "decay=0.5", "tova"], [8], 100).policies == [Policy(decay=0.5).name, "tova"]
    assert reference_policy(NAMES["window"], ["h2o", "window"]) == "window"


@pytest.mark.parametrize(
    ("policies", "sizes", "message"),
    [
        ("tova", [8], "policies='tova': must be a list"),
        (["tova"], 8, "sizes=8: must be a list"),
        ([], [8], "policies=[]: must not be empty"),
        (["tova"], [], "sizes=[]: must not be empty"),
        ([None], [8], "policies=None: must be the name of a policy"),
        (["tova"], ["8:upper"], "name a budget with the policy, as in 'echo:upper'"),
        (["tova"], [Size(8)], "must be a whole number of KV rows"),
        (["tova"], [8.0], "sizes=8.0: must be a whole number of KV rows"),
        ([ScoredPolicy(score=lambda seen: seen.importance)], [8], "a function has none"),
    ],
)
def test_lists_that_make_no_table(policies: Any, sizes: Any, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_lists(policies, sizes)
    assert message in str(refused.value)


def test_the_policy_that_others_are_compared_with() -> None:
    assert reference_policy(None, ["h2o", "tova"]) == "tova"
    assert reference_policy(None, ["h2o", "window"]) == "h2o"
    assert reference_policy("WINDOW", ["h2o", "window"]) == "window"
    with pytest.raises(UsageError) as refused:
        reference_policy("tova", ["h2o"])
    assert refused.value.name == "against"


def test_a_grid_without_results_has_no_cells() -> None:
    assert Grid(["tova"], [8], 100, frozenset()).cells == []
