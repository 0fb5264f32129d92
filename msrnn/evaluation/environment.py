"""The environment of a result: hardware, versions, commit; and the identity of a model."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from transformers import PreTrainedModel

from msrnn.backends import resolve_backend
from msrnn.hf.inspect import inspect_model
from msrnn.hf.rnn import MultiStateRNN

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "transformers", "triton", "numba", "numpy")


def environment(device: torch.device | str = "cpu") -> dict[str, str]:
    """Hardware, versions and commit. The commit is empty outside a clone of this repository."""
    device = torch.device(device)
    return {
        **({"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "commit": commit(),
    }


def model_identity(model: PreTrainedModel) -> dict[str, str]:
    """What identifies the results of a model, its weights and dtype; and the backends that compute them."""
    spec = inspect_model(model)
    devices = {layer.shape.device for layer in spec.layers if layer}
    return {
        "fingerprint": spec.fingerprint,
        "dtype": spec.dtype,
        "backend": _join(resolve_backend("auto", device).name for device in devices),
    }


def model_key(model: PreTrainedModel) -> dict[str, str]:
    """The fields that identify the results of a model."""
    identity = model_identity(model)
    return {name: identity[name] for name in ("fingerprint", "dtype")}


def backend_names(rnn: MultiStateRNN) -> str:
    return _join(rnn.spec.backends)


def _join(names: Iterable[str]) -> str:
    return "/".join(sorted(set(names)))


def commit() -> str:
    top = _output("git", "-C", str(ROOT), "rev-parse", "--show-toplevel")
    if not top or Path(top) != ROOT:  # msrnn is installed inside a clone of another repository
        return ""
    return _output("git", "-C", str(ROOT), "describe", "--always", "--dirty")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    lines = _output("lscpu").splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model name")]
    return f"{platform.machine()} {names[0] if names else platform.processor()}".strip()


def _output(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
