"""msrnn's attention backend, and the options of the model that is loaded.

vLLM passes its configuration on to some methods of a backend only. The others use the options of the model that this
process has loaded last; the metadata builder compares them with its own configuration.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionBackend

from msrnn.errors import UsageError
from msrnn.integrations.vllm.attention import BoundedAttention
from msrnn.integrations.vllm.metadata import BoundedMetadataBuilder
from msrnn.integrations.vllm.refusals import check_config
from msrnn.integrations.vllm.spec import bound_spec
from msrnn.integrations.vllm_options import Options


class Chosen:
    """The options of the model that this process loads or has loaded last."""

    last: ClassVar[Options | None] = None

    @classmethod
    def find(cls) -> Options | None:
        config = get_current_vllm_config_or_none()
        if config is not None:
            cls.last = check_config(config)
        return cls.last


class BoundedBackend(AttentionBackend):
    """What vLLM gets in the place of its own backend where the option is there, or by `--attention-backend CUSTOM`."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def get_impl_cls(cls) -> Any:
        _require()
        return BoundedAttention

    @classmethod
    def get_builder_cls(cls) -> Any:
        return BoundedMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return bound_spec(spec, _require().bound)

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, *_: Any, **others: Any) -> tuple[int, ...]:
        """Where the spec does not say it: pages of any length."""
        return num_blocks, -1


def _require() -> Options:
    options = Chosen.find()
    if options is None:
        raise UsageError(
            "this is msrnn's attention, which needs a policy and a size",
            name="attention_backend",
            value="CUSTOM",
            advice='add --additional-config \'{"msrnn": {"policy": "tova", "size": 512}}\'',
        )
    return options
