"""Who computes: plain torch, compiled CPU loops, or Triton kernels. An argument, never an environment switch."""

from __future__ import annotations

import importlib.util
import os
import warnings

import torch

BACKENDS = ("auto", "torch", "compiled", "triton")


def choose(backend: str, device: torch.device) -> str:
    """The backend for a device; "auto" is the fastest there is, and says so where that is not the one it should be."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: must be one of {', '.join(BACKENDS)}")
    if backend == "compiled" and device.type != "cpu":
        raise ValueError(f"backend='compiled': its loops run on the CPU, not on {device}; use 'auto' or 'triton'")
    if backend == "triton":
        if not _has_triton():
            raise ValueError("backend='triton': the package triton is not installed: pip install 'msrnn[triton]'")
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError("backend='triton': its kernels need a GPU; on a CPU use 'auto'")
    if backend != "auto":
        return backend
    if device.type == "cpu":
        return "compiled"
    if device.type == "cuda" and _has_triton():
        return "triton"
    warnings.warn(f"no kernels for {device} (pip install 'msrnn[triton]' on CUDA): plain torch is used", stacklevel=2)
    return "torch"


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
