"""Kernels compile, and fit into the shared memory of GPUs that have little."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from msrnn.backends.triton.scan import pays, room

LEAST = (89, 99 * 2**10)  # an RTX 4090's, the least of any since capability 8.0
H200 = (90, 232_448)


@pytest.mark.parametrize(
    ("gpu", "dtype", "dim", "heads", "size", "length"),
    [  # on a GPU, other tests compile the kernels, too
        pytest.param(LEAST, "bfloat16", 128, 8, 512, 512, marks=pytest.mark.slow),
        pytest.param(LEAST, "float32", 256, 8, 512, 512, marks=pytest.mark.gpu),
        # The weights of a token take just what is not spared; a whole chunk of tokens would take more, and not fit.
        pytest.param(H200, "bfloat16", 128, 12, 4096, 16, marks=pytest.mark.slow),
        pytest.param(LEAST, "bfloat16", 128, 32, 512, 192, marks=pytest.mark.slow),
        # The widest that is read in rounds.
        pytest.param(LEAST, "bfloat16", 128, 32, 4096, 192, marks=pytest.mark.slow),
    ],
)
def test_kernels_fit_into_shared_memory(
    gpu: tuple[int, int], dtype: str, dim: int, heads: int, size: int, length: int, tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    arguments = [sys.executable, "-m", "tests.helpers.compiled", *map(str, (*gpu, dtype, dim, heads, size, length))]
    done = subprocess.run(arguments, env=environment, cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    rounds = pays(1, heads, length, room(length, size + 1 + length).width)
    assert len({kernel["kernel"] for kernel in kernels}) == 9 + rounds
    assert max(kernel["warps"] for kernel in kernels) <= 32
    assert [kernel for kernel in kernels if kernel["shared"] > gpu[1]] == []
