from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from msrnn.budget import load_budget
from msrnn.evaluation.cells import FULL
from msrnn.evaluation.data.texts import Choice, Document, choose
from msrnn.evaluation.runner import Runner
from msrnn.evaluation.store import Store
from msrnn.evaluation.tasks.layer_losses import CHECK, Case, Report, figure, layer_loss_task
from msrnn.evaluation.tasks.perplexity import Reader
from msrnn.hf.rnn import MultiStateRNN
from msrnn.size import Size
from tests.helpers.tiny import build, llama, tokens

TOKENS = 10
# Layer 0 costs little, and layer 1 much: 2 nats of 10 tokens at 8 KV rows.
RESULTS = {
    Case(FULL): [20.0, 30.0],
    Case("tova", 0, 8): [20.1, 30.1],
    Case("tova", 0, 64): [20.0, 30.0],
    Case("tova", 1, 8): [22.0, 32.0],
    Case("tova", 1, 64): [21.0, 31.0],
}


def report(*means: int) -> Report:
    return Report("tova", [0, 1], [8, 64], RESULTS, TOKENS, means)


def test_the_cost_of_a_layer_is_per_token_and_paired() -> None:
    assert report().cost(1, 8) == pytest.approx((0.2, 0.2, 0.2))
    assert report().cost(0, 64) == pytest.approx((0, 0, 0))
    assert report().curves.losses[0] == pytest.approx((0.01, 0.0))


def test_the_layer_that_costs_more_gets_more() -> None:
    cheap, dear = report(24).divided[24]
    assert cheap < dear
    assert cheap + dear == 48
    assert report(8, 64).divided == {8: [8, 8], 64: [64, 64]}


def test_tables() -> None:
    costs, divided = report(8).tables("a title")
    assert [row[0] for row in costs.strings()] == ["0", "1"]
    assert costs.strings()[1][1].startswith("200.00")
    assert divided.strings() == [["0", "8"], ["1", "8"], ["all", "16"]]
    assert len(report().tables("a title")) == 1
    assert "95 %" in report(24).markdown("a title", {"commit": "abc"})


def test_the_file_is_a_budget(tmp_path: Path) -> None:
    path = tmp_path / "budget.json"
    report(24).write(path, {"model": "tiny"})
    assert json.loads(path.read_text())["about"] == {"model": "tiny"}
    assert load_budget(str(path)).sizes(24, 2) == report(24).divided[24]


def test_a_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure(report(24), tmp_path, "a title")
    assert {path.name for path in tmp_path.iterdir()} == {"budget.png", "budget.svg"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [({}, None), ({"layer": "1"}, "its field 'layer' is '1'"), ({"nll": []}, "1 chunks with 0 nll")],
)
def test_records_are_checked(change: dict[str, Any], reason: str | None) -> None:
    store, model = Store(None), build(llama())
    data = choose([Document("a", lambda: "", lambda: tokens(1, 24)[0].tolist())], None, Choice(24, None, 1, 0))
    Runner(layer_loss_task(model, data, {}), store, model).results([Case("tova", 1, 6)])
    assert CHECK({**store.records[0], **change}) == reason


def test_one_layer_is_bounded_and_the_others_are_not() -> None:
    model = build(llama())
    data = choose([Document("a", lambda: "", lambda: tokens(1, 24)[0].tolist())], None, Choice(24, None, 1, 0))
    cells = [Case(FULL), Case("tova", 0, 6), Case("tova", 1, 6)]
    results = Runner(layer_loss_task(model, data, {}), Store(None), model).results(cells)
    for case, found in results.items():
        size = None if case.layer is None else Size(tuple(6 if layer == case.layer else None for layer in range(2)))
        alone = Reader(MultiStateRNN(model, case.policy, size), data.given)
        assert found == pytest.approx(alone.nll(torch.tensor([[*chunk.ids] for chunk in data.chunks])))
    assert len({value for found in results.values() for value in found}) == 3
