"""The attention backends that vLLM knows: one for a CPU, which the option switches on, and one to ask for by name.

vLLM passes its configuration on to some methods of a backend only. The others use the options of the model that this
process has loaded last; the metadata builder compares them with its own configuration.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

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


class CPUBackend(CPUAttentionBackend):
    """vLLM's own backend on a CPU, unless the option asks for a bounded state."""

    @classmethod
    def get_impl_cls(cls) -> Any:
        return BoundedAttention if Chosen.find() else super().get_impl_cls()

    @classmethod
    def get_builder_cls(cls) -> Any:
        return BoundedMetadataBuilder if Chosen.find() else super().get_builder_cls()

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        options = Chosen.find()
        return bound_spec(spec, options.bound) if options else super().customize_spec(spec)


class BoundedBackend(AttentionBackend):
    """For `--attention-backend CUSTOM`, on other devices. vLLM then needs the option as well."""

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
