"""A bounded state for every request inside vLLM: `pip install 'msrnn[vllm]'`, and an option.

    vllm serve MODEL --dtype float32 --additional-config '{"msrnn": {"policy": "tova", "size": 512}}'

vLLM finds this package by its entry point and calls `register`. Without the option vLLM computes as it always does.
"""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("vllm") is None:
    raise ImportError("vLLM is not installed (no module vllm): pip install 'msrnn[vllm]'")

VERSIONS = ("0.26", "0.32")  # of vLLM: what the plug-in builds on differs between versions
_HERE = __name__


def register() -> None:
    """Tell vLLM of the attention backends. It calls this in every of its processes, before there is a configuration.

    Other versions of vLLM are left alone, with a warning.
    """
    import vllm
    from vllm.logger import init_logger

    if not vllm.__version__.startswith(tuple(f"{version}." for version in VERSIONS)):
        init_logger("vllm.msrnn").warning(
            "msrnn: vLLM %s is not supported: its option has no effect; install vLLM %s",
            vllm.__version__,
            " or ".join(VERSIONS),
        )
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for member in AttentionBackendEnum:
        if member.value:
            register_backend(member, f"{_HERE}.choice.{member.name}")
    register_backend(AttentionBackendEnum.CUSTOM, f"{_HERE}.backend.BoundedBackend")
