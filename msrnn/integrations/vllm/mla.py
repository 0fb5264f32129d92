"""vLLM's backends for multi-head latent attention on a CPU, which refuse the option: latent rows cannot be bounded."""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from msrnn.integrations.vllm.refusals import check_config


class RefusingMLABackend(CPUMLABackend):
    @classmethod
    def get_impl_cls(cls) -> Any:
        _refuse()
        return super().get_impl_cls()


class RefusingAMXMLABackend(AMXMLABackend):
    @classmethod
    def get_impl_cls(cls) -> Any:
        _refuse()
        return super().get_impl_cls()


def _refuse() -> None:
    config = get_current_vllm_config_or_none()
    if config is not None:
        check_config(config)
