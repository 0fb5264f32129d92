"""Readings of a step, and the check that vLLM continues where a page is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.vllm_engines import make_config, write_model

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'msrnn[vllm]'")

from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from msrnn.errors import UsageError
from msrnn.integrations.vllm import metadata
from msrnn.integrations.vllm.metadata import BoundedMetadataBuilder, Reading
from msrnn.integrations.vllm.spec import bound_spec
from msrnn.integrations.vllm_options import Options

CPU = torch.device("cpu")
OPTIONS = {"policy": "tova", "size": 16}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_config(write_model("llama", tmp_path_factory.mktemp("llama")), OPTIONS)


def plain_spec() -> FullAttentionSpec:
    return FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)


def open_builder(config: Any, size: int = 16) -> BoundedMetadataBuilder:
    spec = bound_spec(plain_spec(), Options.parse({"policy": "tova", "size": size}).bound)
    return BoundedMetadataBuilder(spec, ["layer"], config, CPU)


def step(pages: list[int], new: list[int], ends: list[int]) -> CommonAttentionMetadata:
    """A step with `new` tokens of each request, after which it has `ends` tokens."""
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    lengths = torch.tensor(ends, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=len(pages),
        num_actual_tokens=sum(new),
        max_query_len=max(new),
        max_seq_len=max(ends),
        block_table_tensor=torch.tensor(pages, dtype=torch.int32)[:, None],
        slot_mapping=torch.zeros(sum(new), dtype=torch.int64),
    )


def test_readings_of_a_step(config: Any) -> None:
    """Padding has vLLM's null block, or no tokens."""
    builder = open_builder(config)
    builder.build(0, step([3, 7], [5, 9], [5, 9]))
    metadata = builder.build(0, step([7, 3, 2, 0, 4], [1, 1, 6, 1, 0], [10, 6, 6, 1, 8]))
    assert metadata.readings == (Reading(7, 9, 0, 1), Reading(3, 5, 1, 2), Reading(2, 0, 2, 8))
    assert metadata.steps is None
    assert metadata.prompts == ()


@pytest.mark.parametrize("end", [5, 7, 12])
def test_a_page_neither_goes_back_nor_skips_tokens(config: Any, end: int) -> None:
    builder = open_builder(config)
    builder.build(0, step([3], [5], [5]))
    with pytest.raises(RuntimeError, match=f"page 3 has read 5 tokens, and vLLM continues with token {end - 1}"):
        builder.build(0, step([3], [1], [end]))


def test_a_request_begins_anew_in_any_page(config: Any) -> None:
    builder = open_builder(config)
    builder.build(0, step([3], [5], [5]))
    assert builder.build(0, step([3], [6], [6])).readings == (Reading(3, 0, 0, 6),)
    builder.build(0, step([3], [1], [7]))


def test_a_prefix_that_the_page_has_not_read(config: Any) -> None:
    with pytest.raises(RuntimeError, match="page 2 has read 0 tokens, and vLLM continues with token 16"):
        open_builder(config).build(0, step([2], [4], [20]))


def test_a_cache_that_was_planned_for_other_options(config: Any) -> None:
    with pytest.raises(UsageError, match="was planned for another model"):
        open_builder(config, size=17)
    with pytest.raises(UsageError, match="was planned for another model"):
        BoundedMetadataBuilder(plain_spec(), ["layer"], config, CPU)


def test_padding_of_a_captured_step(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is captured with null blocks only. Its replays read the same addresses, of fewer requests at times."""
    monkeypatch.setattr(metadata, "reads_together", lambda _: True)
    builder = open_builder(config)
    captured = builder.build(0, step([0, 0, 0, 0], [1, 1, 1, 1], [300, 300, 300, 300])).steps
    assert captured is not None
    assert captured.position.tolist() == [-1, -1, -1, -1]
    builder.build(0, step([7, 3], [9, 5], [9, 5]))
    replayed = builder.build(0, step([7, 3, 0, 0], [1, 1, 0, 0], [10, 6, 0, 0]))
    assert replayed.prompts == ()
    assert (captured.pages.tolist(), captured.position.tolist()) == ([7, 3, 0, 0], [9, 5, -1, -1])


def test_decode_steps_beside_prompts(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's last token, alone in its step, is a decode step where it stands before the prompts."""
    monkeypatch.setattr(metadata, "reads_together", lambda _: True)
    builder = open_builder(config)
    builder.build(0, step([7, 3], [9, 5], [9, 5]))
    mixed = builder.build(0, step([7, 3, 2, 4], [1, 1, 6, 1], [10, 6, 6, 1]))
    assert mixed.steps is not None
    assert (mixed.steps.pages.tolist(), mixed.steps.position.tolist()) == ([7, 3], [9, 5])
    [prompts] = mixed.prompts
    assert prompts.pages.tolist() == [2, 4]
    assert prompts.targets.tolist() == [*range(2, 9)]
