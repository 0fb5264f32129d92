from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import msrnn
from msrnn.core.weights_file import read_training
from msrnn.errors import UsageError
from msrnn.evaluation.runner import Progress
from msrnn.hf.inspect import inspect_model
from msrnn.training import fit
from msrnn.training.plan import TrainingPlan
from msrnn.training.train import train_weights
from tests.helpers.shards import Others
from tests.helpers.tiny import FAMILIES, build, tokens

Texts = dict[str, list[list[int]]]


def test_less_of_the_future_is_lost_on_held_out_text(
    model: PreTrainedModel, plan: TrainingPlan, tmp_path: Path
) -> None:
    before = [parameter.clone() for parameter in model.parameters()]
    draw = torch.Generator().manual_seed(1)
    few = [torch.randint(3, 8, (plan.length,), generator=draw).tolist() for _ in range(20)]
    larger = replace(plan, chunks=16, held_out=4, hidden=16, steps=150)
    trained = train_weights(model, {"few": few}, tmp_path / "w.safetensors", larger, about={"made": "here"})
    assert all(map(torch.equal, before, model.parameters()))
    assert list(tmp_path.iterdir()) == [trained.path]
    for size in plan.sizes:
        lost = trained.lost["few"][size]
        assert 0 < lost.future < lost.weights < lost.policy < 1
    assert len(trained.table.rows) == 2
    training = read_training(trained.path)
    assert training["sizes"] == [24, 40]
    assert training["texts"] == {"few": 16}
    assert training["made"] == "here"
    assert training["lost"]["few"]["24"]["policy"] == pytest.approx(trained.lost["few"][24].policy)
    for size in (24, 30):
        rnn, ids = msrnn.MultiStateRNN(model, f"echo@{trained.path}", size), tokens(1, 100)
        assert rnn.read(ids, rnn.state()).isfinite().all()


@pytest.mark.parametrize("after", [2, 9])
def test_an_interrupted_training_resumes_to_the_same_file(
    after: int,
    model: PreTrainedModel,
    plan: TrainingPlan,
    texts: Texts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it reads, and while it trains."""
    monkeypatch.setattr(fit, "CHECKPOINT", 3)
    short = replace(plan, steps=10, rounds=2, sizes=(24,))
    at_once = train_weights(model, texts, tmp_path / "once.safetensors", short)
    out, seen = tmp_path / "resumed.safetensors", 0

    def stop(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == after:
            raise KeyboardInterrupt

    monkeypatch.setattr("msrnn.training.train.SHOWN", 2)
    with pytest.raises(KeyboardInterrupt):
        train_weights(model, texts, out, short, progress=Progress(cell=stop))
    assert not out.exists()
    with pytest.raises(UsageError, match="unfinished work of another training"):
        train_weights(model, texts, out, replace(short, seed=1))
    notes = list[str]()
    resumed = train_weights(model, texts, out, short, progress=Progress(note=notes.append))
    assert any("continuing" in line for line in notes)
    assert resumed.lost == at_once.lost
    assert resumed.path.read_bytes() == at_once.path.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["once.safetensors", "resumed.safetensors"]


def test_layers_that_are_not_trained_have_networks_without_effect(
    plan: TrainingPlan, texts: Texts, tmp_path: Path
) -> None:
    model = build(FAMILIES["gemma2"]())
    short = replace(plan, steps=2, sizes=(24,), chunks=2, held_out=1)
    trained = train_weights(model, texts, tmp_path / "w.safetensors", short)
    rnn = msrnn.MultiStateRNN(model, f"echo@{trained.path}", 24)
    assert rnn.read(tokens(1, 50), rnn.state()).isfinite().all()


def test_a_model_without_a_layer_to_train_is_refused(plan: TrainingPlan, texts: Texts, tmp_path: Path) -> None:
    model = build(FAMILIES["mistral-sliding"]())
    with pytest.raises(UsageError, match="no layer in which the policy chooses"):
        train_weights(model, texts, tmp_path / "w.safetensors", plan)


def test_a_model_that_processes_share_is_refused(
    model: PreTrainedModel, plan: TrainingPlan, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect_model(model), "shards", Others([torch.tensor([0])]))
    with pytest.raises(UsageError, match="is shared by processes; use one process"):
        train_weights(model, texts, tmp_path / "w.safetensors", plan)


def test_memory_is_checked_before_the_work(
    model: PreTrainedModel, plan: TrainingPlan, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msrnn.core.device_memory.available_bytes", lambda _: 1000)
    with pytest.raises(UsageError, match=r"training takes .* MB, and 0\.0 MB is free on cpu: use fewer chunks"):
        train_weights(model, texts, tmp_path / "w.safetensors", plan)


def test_a_name_that_no_policy_can_have_is_refused_first(
    model: PreTrainedModel, plan: TrainingPlan, texts: Texts, tmp_path: Path
) -> None:
    for name in ("weights.bin", "a.safetensors:b.safetensors"):
        with pytest.raises(UsageError, match="weights="):
            train_weights(model, texts, tmp_path / name, plan)
    assert list(tmp_path.iterdir()) == []
