"""Studies from a model: what is traced, what is taken from the folder, and what callbacks get."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
from transformers import PreTrainedModel

import msrnn
from msrnn.analysis.explorer import token_texts, trace_policies
from msrnn.analysis.study import StudyProgress, run_study
from msrnn.analysis.tagging import passage
from msrnn.policy import Policy
from tests.helpers.characters import character_model, character_tokenizer
from tests.helpers.networks import write_random_weights
from tests.helpers.tiny import build, llama, tokens

IDS = tokens(2, 30).numpy()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama())


def test_only_missing_traces_are_computed_and_earlier_ones_are_included(model: PreTrainedModel, tmp_path: Path) -> None:
    calls: list[object] = []
    read: list[int] = []
    watch = StudyProgress(lambda *counts: calls.append(counts), calls.append, read.append)
    first = run_study(model, IDS, [("tova", 6)], tmp_path, 1, {}, None, watch)
    assert (calls, sum(read)) == ([(0, 2), "tova 6"], 60)
    both = run_study(model, IDS, [("h2o", 6), ("tova", 7)], tmp_path, 2, {}, None, watch)
    assert calls[2:] == [(0, 4), "h2o 6", "tova 7"]
    assert list(both.summaries) == [("h2o", 6), ("tova", 7), ("tova", 6)]
    assert numpy.array_equal(both.summaries["tova", 6].life, first.summaries["tova", 6].life)
    again = run_study(model, IDS, [("tova", 6)], tmp_path, 1, {}, None, watch)
    assert (calls[5:], sum(read)) == ([(2, 2)], 180)
    assert numpy.array_equal(again.summaries["h2o", 6].recent, both.summaries["h2o", 6].recent)
    other = run_study(model, IDS[:, :-1], [("tova", 6)], tmp_path, 1, {}, None, watch)  # no h2o of these chunks
    assert list(other.summaries) == [("tova", 6)]


def test_earlier_traces_whose_file_of_weights_is_gone_are_left_out(model: PreTrainedModel, tmp_path: Path) -> None:
    file = write_random_weights(tmp_path / "w.safetensors", model)
    ignore = StudyProgress(lambda *_: None, lambda _: None, lambda _: None)
    run_study(model, IDS, [(f"echo@{file}", 6)], tmp_path / "traces", 2, {}, None, ignore)
    file.unlink()
    found = run_study(model, IDS, [("tova", 6)], tmp_path / "traces", 2, {}, None, ignore)
    assert list(found.summaries) == [("tova", 6)]


def test_one_text_under_several_policies() -> None:
    model, tokenizer = character_model(), character_tokenizer()
    read = passage("some words", tokenizer, add_special_tokens=True)
    counts: dict[str, list[int]] = {"tova": [], "h2o": []}
    found = trace_policies(
        model, read.ids, [Policy.parse(name) for name in counts], 4, lambda name: counts[name].append
    )
    assert [(one.name, one.size) for one in found] == [("tova", 4), ("h2o", 4)]
    assert {name: sum(tokens) for name, tokens in counts.items()} == {"tova": 11, "h2o": 11}
    for one in found:
        expected = msrnn.trace(
            msrnn.MultiStateRNN(model, one.name, 4), tokenizer("some words", return_tensors="pt").input_ids
        )
        assert (one.trace.evicted_at == expected.evicted_at[0].numpy()).all()
    assert token_texts(read, tokenizer) == ["<s>", *"some words"]
