"""What stands beside every figure: hardware, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "transformers", "triton", "numba", "numpy")


def setting(device: torch.device | str = "cpu") -> dict[str, str]:
    """Names only, never addresses; the commit is empty outside a clone of this repository."""
    where = torch.device(device)
    return {
        **({"gpu": torch.cuda.get_device_name(where)} if where.type == "cuda" else {}),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "commit": commit(),
    }


def commit() -> str:
    top = _output("git", "-C", str(ROOT), "rev-parse", "--show-toplevel")
    if not top or Path(top) != ROOT:  # installed into an environment that lies in a clone of something else
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
