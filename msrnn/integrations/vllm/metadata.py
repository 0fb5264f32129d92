"""The tokens of a step in vLLM: which page they belong to, and how many came before them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from msrnn.backends import resolve_backend
from msrnn.errors import UsageError
from msrnn.integrations.vllm.spec import BoundedSpec
from msrnn.integrations.vllm_batch import Prompts, StepBuffers, Steps, count_steps, gather_prompts
from msrnn.integrations.vllm_options import Options, read_options
from msrnn.integrations.vllm_page_check import NO_PAGE, LaterPageCheck, PageCheck


@dataclass(frozen=True)
class Reading:
    """The new tokens of one request: those from `start` to `stop` of the step."""

    page: int
    begin: int  # tokens of the request that its page has read
    start: int
    stop: int


@dataclass(frozen=True)
class BoundedMetadata(AttentionMetadata):
    """The new tokens of a step: request by request on a CPU, in batches elsewhere."""

    readings: tuple[Reading, ...] = ()
    steps: Steps | None = None
    prompts: tuple[Prompts, ...] = ()


class BoundedMetadataBuilder(AttentionMetadataBuilder[BoundedMetadata]):
    """Turns vLLM's block tables into pages: a request has one block, which is its page."""

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
        self._together = reads_together(device)
        if not self._together:
            self._check = PageCheck()
            return
        self.reorder_batch_threshold = 1  # vLLM then puts decode steps first
        captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        most = max(vllm_config.scheduler_config.max_num_seqs, captured)
        self._buffers, self._later_check = StepBuffers(most, device), LaterPageCheck(most, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Decode steps can be captured where kernels compute them in place. Prompts are read outside of graphs."""
        options, device = read_options(vllm_config.additional_config), vllm_config.device_config.device_type
        if device == "cuda" and options is not None and captures_steps(options, device):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> BoundedMetadata:
        given = common_attn_metadata
        starts = given.query_start_loc_cpu.tolist()
        ends = given.seq_lens_cpu_upper_bound.tolist()[: len(starts) - 1]
        lengths = [stop - start for start, stop in pairwise(starts)]
        begins = [end - length for end, length in zip(ends, lengths, strict=True)]
        pages = given.block_table_tensor[: len(ends), 0]
        if not self._together:
            numbers = pages.tolist()
            self._check.follow(numbers, begins, ends)
            requests = zip(numbers, begins, starts, starts[1:], strict=False)
            return BoundedMetadata(tuple(Reading(*one) for one in requests if one[0] != NO_PAGE and one[3] > one[2]))
        self._later_check.follow(pages, begins, ends)
        count = count_steps(lengths)
        steps = self._buffers.fill(pages[:count], given.query_start_loc[: count + 1], given.seq_lens[:count])
        return BoundedMetadata((), steps, gather_prompts(pages, count, starts, begins, ends))


def reads_together(device: torch.device) -> bool:
    """Whether requests are read in batches. numba's loops are fastest for one request after the other."""
    return device.type != "cpu"


def captures_steps(options: Options, device: str) -> bool:
    return resolve_backend(options.backend, torch.device(device)).name == "triton"
