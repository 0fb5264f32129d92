"""Options of recall that depend on a model: refused where no row is lost, and limited to the training length."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from msrnn.bound import Bound, layer_bound
from msrnn.core.paged_slots import PagedSlots
from msrnn.core.recall_slots import RecallSlots
from msrnn.core.rope import spacing
from msrnn.core.slots import LayerShape, Slots
from msrnn.errors import UsageError
from msrnn.hf.recall_options import add_recall, check_recall, count_archived, find_reach, is_paged, slots_class
from msrnn.policy import FULL, Policy
from msrnn.recall import QUESTION, SEGMENT, Recall
from tests.helpers.shards import Others

SHAPE = LayerShape(4, 2, 8, 8, torch.float32, torch.device("cpu"))
TOVA = Policy.parse("tova")
BOUND = Bound(TOVA, 64, recall=Recall(16))


def test_layers_that_lose_no_row_have_no_archive() -> None:
    sliding = layer_bound(TOVA, 64, 32)
    assert sliding is not None
    assert add_recall(sliding, Recall(8)).recall is None
    assert add_recall(Bound(TOVA, 64), Recall(8)).recall == Recall(8)
    with pytest.raises(UsageError, match="recall=8: no layer"):
        check_recall(Recall(8), [sliding], [False])
    with pytest.raises(UsageError, match="a size for every layer"):
        check_recall(Recall(8), [BOUND, layer_bound(FULL, None, None)], [False, False])
    check_recall(Recall(8), [BOUND, sliding, None], [False, False, True])


def test_recalled_rows_stand_as_far_as_held_ones_can_be() -> None:
    config = LlamaConfig(max_position_embeddings=512)
    assert find_reach(config, BOUND, None) == 0
    assert find_reach(config, BOUND, spacing("compact")) == BOUND.size
    assert find_reach(config, BOUND, spacing("compressed:3")) == 3 * BOUND.size
    assert find_reach(config, BOUND, spacing("compressed")) == 4 * BOUND.size
    assert find_reach(config, replace(BOUND, window=6 * BOUND.size), spacing("compressed")) == 6 * BOUND.size - 1
    assert find_reach(config, replace(BOUND, window=6 * BOUND.size), spacing("compact")) == BOUND.size


def test_recalled_rows_stand_within_the_training_length() -> None:
    config = LlamaConfig(max_position_embeddings=512)
    for size in (200, 512 - QUESTION):
        assert find_reach(config, replace(BOUND, size=size), spacing("compressed")) == 512 - QUESTION
    with pytest.raises(UsageError, match="do not fit the 512 positions"):
        find_reach(config, replace(BOUND, size=500), spacing("compact"))


def test_kernels_have_archives_of_their_own() -> None:
    exact = replace(BOUND, recall=Recall(16, search="exact"))
    assert is_paged(SHAPE, BOUND, "triton")
    assert not is_paged(SHAPE, BOUND, "torch")
    assert not is_paged(SHAPE, exact, "triton")
    assert not is_paged(replace(SHAPE, state_dtype=torch.int8), BOUND, "triton")
    assert slots_class(replace(SHAPE, paged=True), BOUND) is PagedSlots
    assert slots_class(SHAPE, BOUND) is RecallSlots
    assert slots_class(SHAPE, Bound(TOVA, 64)) is Slots


def test_bytes_of_an_archive_are_tokens_of_all_layers() -> None:
    row = 2 * 2 * (8 + 8) * 4  # two layers, two heads, float32
    limited = replace(BOUND, recall=Recall(16, limit=10 * SEGMENT * row))
    assert count_archived([(SHAPE, BOUND), (SHAPE, BOUND)]) is None
    assert count_archived([(SHAPE, limited), (SHAPE, limited)]) == 10 * SEGMENT
    shared = replace(SHAPE, shards=Others([torch.zeros(1)]))  # another process has as many heads
    assert count_archived([(shared, limited), (SHAPE, limited)]) == 20 * SEGMENT // 3
    small = replace(BOUND, recall=Recall(16, limit=100))
    with pytest.raises(UsageError, match="archive_bytes=100"):
        count_archived([(SHAPE, small)])
