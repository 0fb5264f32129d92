from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from msrnn.errors import UsageError
from msrnn.training.chunks import cut_kinds
from msrnn.training.plan import TrainingPlan
from tests.training.conftest import LENGTH

Texts = dict[str, list[list[int]]]


def test_each_kind_has_its_share(model: PreTrainedModel, plan: TrainingPlan, texts: Texts) -> None:
    kinds = cut_kinds(model, texts, None, replace(plan, chunks=5))
    assert [(kind.name, *map(len, (kind.train, kind.held_out))) for kind in kinds] == [("few", 3, 2), ("many", 2, 2)]
    assert all(chunks.shape[1] == LENGTH for kind in kinds for chunks in (kind.train, kind.held_out))
    for kind in kinds:
        for row in kind.held_out:
            assert not (kind.train == row).all(1).any()


def test_one_long_text_is_enough(model: PreTrainedModel, plan: TrainingPlan) -> None:
    ids = list(range(3, 90)) * 40
    (kind,) = cut_kinds(model, {"one": [ids]}, None, plan)
    both = torch.cat([kind.train, kind.held_out])
    assert both.shape == (8, LENGTH)
    starts = {tuple(row[:3].tolist()) for row in both}
    assert len(starts) == 8


def test_too_little_text_says_how_many_tokens_are_needed(
    model: PreTrainedModel, plan: TrainingPlan, texts: Texts
) -> None:
    message = r"few: 6 chunks of 256 tokens, and 9 are needed, which are 2,304 tokens; give more text"
    with pytest.raises(UsageError, match=message):
        cut_kinds(model, texts, None, replace(plan, chunks=14))
    with pytest.raises(UsageError, match=r"short: 0 chunks of 256 tokens, and 8 are needed, which are 2,048 tokens"):
        cut_kinds(model, {"short": [[5] * 100]}, None, plan)


def test_other_bad_texts(model: PreTrainedModel, plan: TrainingPlan, texts: Texts) -> None:
    with pytest.raises(UsageError, match="texts: empty"):
        cut_kinds(model, {}, None, plan)
    with pytest.raises(UsageError, match="one for each of the 2 kinds"):
        cut_kinds(model, texts, None, replace(plan, chunks=1))
    with pytest.raises(UsageError, match="tokenizer: texts are strings"):
        cut_kinds(model, {"a": ["text"]}, None, plan)
