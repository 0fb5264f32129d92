"""Backends: plain torch, numba loops on a CPU, or Triton kernels on a GPU. The caller chooses one by an argument."""

from __future__ import annotations

import importlib.util
import os
import warnings

import torch

from msrnn.backends.base import Backend
from msrnn.errors import UsageError

BACKENDS = ("auto", "torch", "numba", "triton")


def resolve_backend(name: str, device: torch.device) -> Backend:
    """The backend for a device. "auto" is the fastest one that is available, with a warning if that is plain torch."""
    if name not in BACKENDS:
        raise UsageError(f"must be one of {', '.join(BACKENDS)}", name="backend", value=name)
    if name == "numba" and device.type != "cpu":
        raise UsageError(
            f"its loops run on a CPU, not on {device}", name="backend", value=name, advice="use 'auto' or 'triton'"
        )
    if name == "triton":
        if not _has_triton():
            message = "the package triton is not installed: pip install 'msrnn[triton]'"
            raise UsageError(message, name="backend", value=name)
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise UsageError("its kernels need a GPU", name="backend", value=name, advice="on a CPU use 'auto'")
    if name == "auto":
        name = _fastest(device)
    if name == "numba":
        from msrnn.backends.numba import NumbaBackend

        return NumbaBackend()
    if name == "triton":
        from msrnn.backends.triton import TritonBackend

        return TritonBackend()
    from msrnn.backends.torch import TorchBackend

    return TorchBackend()


def resolve_scored_backend(name: str) -> Backend:
    """The backend of layers whose policy has a Python function."""
    if name not in ("auto", "torch"):
        raise UsageError("has no policies with a Python function", name="backend", value=name, advice="use 'torch'")
    from msrnn.backends.scored import ScoredBackend

    return ScoredBackend()


def _fastest(device: torch.device) -> str:
    if device.type == "cpu":
        return "numba"
    if device.type == "cuda" and _has_triton():
        return "triton"
    warnings.warn(f"no kernels for {device} (pip install 'msrnn[triton]' on CUDA): plain torch is used", stacklevel=3)
    return "torch"


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
