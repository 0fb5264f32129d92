"""The tokens of a step in vLLM, request by request: which page they belong to, and how many came before them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from msrnn.errors import UsageError
from msrnn.integrations.vllm.spec import BoundedSpec
from msrnn.integrations.vllm_options import read_options

NO_PAGE = 0  # vLLM's null block, which padding has


@dataclass(frozen=True)
class Reading:
    """The new tokens of one request: those from `start` to `stop` of the step."""

    page: int
    begin: int  # tokens of the request that its page has read
    start: int
    stop: int

    @property
    def is_step(self) -> bool:
        return self.stop - self.start == 1


@dataclass(frozen=True)
class BoundedMetadata(AttentionMetadata):
    """The readings of a step."""

    readings: tuple[Reading, ...]
    device: torch.device

    def divide(self, together: bool) -> Iterator[tuple[slice | Tensor, int | Tensor]]:
        """The tokens that are computed by one call, with their page; with `together`, all decode steps with theirs."""
        alone = [one for one in self.readings if not (together and one.is_step)]
        if len(alone) < len(self.readings):
            steps = [[one.start, one.page] for one in self.readings if one.is_step]
            tokens, pages = torch.tensor(steps, device=self.device).unbind(1)
            yield tokens, pages
        for one in alone:
            yield slice(one.start, one.stop), one.page


class BoundedMetadataBuilder(AttentionMetadataBuilder[BoundedMetadata]):
    """Turns vLLM's block tables into readings.

    It counts the tokens that each page has read. vLLM must continue where a page is: it may begin anew, but it cannot
    go back, as speculative decoding would, or begin later, as a cached prefix would.
    """

    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        options = read_options(vllm_config.additional_config)
        if not isinstance(kv_cache_spec, BoundedSpec) or options is None or options.bound != kv_cache_spec.bound:
            raise UsageError(
                "this model's KV cache was planned for another model of this process",
                name="kv_cache_spec",
                value=kv_cache_spec,
                advice="load one model at a time",
            )
        self._read: dict[int, int] = {}

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> BoundedMetadata:
        starts = common_attn_metadata.query_start_loc_cpu.tolist()
        ends = common_attn_metadata.seq_lens_cpu_upper_bound.tolist()
        pages = common_attn_metadata.block_table_tensor[:, 0].tolist()
        requests = zip(pages, ends, starts, starts[1:], strict=False)
        readings = tuple(
            Reading(page, end - (stop - start), start, stop)
            for page, end, start, stop in requests
            if page != NO_PAGE and stop > start
        )
        for reading in readings:
            self._follow(reading)
        return BoundedMetadata(readings, self.device)

    def _follow(self, reading: Reading) -> None:
        before = self._read.get(reading.page, 0)
        if reading.begin not in (0, before):
            raise RuntimeError(
                f"page {reading.page} has read {before} tokens, and vLLM continues with token {reading.begin}: a "
                "bounded state cannot go back or skip tokens. Please report which option of vLLM was used"
            )
        self._read[reading.page] = reading.begin + reading.stop - reading.start
