"""A bounded state for every request inside vLLM: `pip install 'msrnn[vllm]'`, and an option.

    vllm serve MODEL --dtype float32 --additional-config '{"msrnn": {"policy": "tova", "size": 512}}'

vLLM finds this package by its entry point and calls `register`. Without the option vLLM computes as it always does.
"""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("vllm") is None:
    raise ImportError("vLLM is not installed (no module vllm): pip install 'msrnn[vllm]'")

VERSION = "0.32"  # of vLLM: what the plug-in builds on differs between versions
_HERE = __name__


def register() -> None:
    """Tell vLLM of the attention backends. It calls this in every of its processes, before there is a configuration.

    Other versions of vLLM are left alone, with a warning.
    """
    import vllm
    from vllm.logger import init_logger

    if not vllm.__version__.startswith(f"{VERSION}."):
        logger = init_logger("vllm.msrnn")
        logger.warning(
            "msrnn: vLLM %s is not supported: its option has no effect; install vLLM %s", vllm.__version__, VERSION
        )
        return
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not current_platform.is_cpu():
        init_logger("vllm.msrnn").info(
            "msrnn: on this device its option has an effect with --attention-backend CUSTOM only, and is ignored "
            "without it; nothing else of vLLM is changed"
        )

    # On a CPU vLLM ignores the choice of a backend, so the name that it takes there decides by the option.
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{_HERE}.backend.CPUBackend")
    register_backend(AttentionBackendEnum.CPU_MLA, f"{_HERE}.mla.RefusingMLABackend")
    register_backend(AttentionBackendEnum.AMX_MLA, f"{_HERE}.mla.RefusingAMXMLABackend")
    register_backend(AttentionBackendEnum.CUSTOM, f"{_HERE}.backend.BoundedBackend")
