"""Jobs of several processes that share a model: torchrun, what they need, and a model whose heads can be split."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

NEEDS_GLOO = [
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="transformers splits models among GPUs with this torch"),
]
BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": None,
}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")  # with a port of its own for every job
MSRNN = [sys.executable, "-c", "import sys; from msrnn.cli import main; sys.exit(main())"]


def torchrun(ranks: int, script: Path, *arguments: Any, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TORCHRUN, "--nproc-per-node", str(ranks), script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
