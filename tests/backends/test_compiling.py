"""Kernels compile, and fit into the shared memory of GPUs that have little."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CAPABILITY, SHARED_MEMORY = 89, 99 * 2**10  # an RTX 4090's, the least of any since capability 8.0


@pytest.mark.parametrize(
    ("dtype", "dim"),
    [  # on a GPU, other tests compile the kernels, too
        pytest.param("bfloat16", 128, marks=pytest.mark.slow),
        pytest.param("float32", 256, marks=pytest.mark.gpu),
    ],
)
def test_kernels_fit_into_little_shared_memory(dtype: str, dim: int, tmp_path: Path) -> None:
    script = Path(__file__).with_name("compiled.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    arguments = [sys.executable, str(script), str(CAPABILITY), str(SHARED_MEMORY), dtype, str(dim)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({kernel["kernel"] for kernel in kernels}) == 7
    assert [kernel for kernel in kernels if kernel["shared"] > SHARED_MEMORY] == []
