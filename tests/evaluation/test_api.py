"""Evaluations called from Python; each function has a file in api/."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_functions_does_not_load_torch() -> None:
    code = "import sys; from msrnn import evaluation; assert 'torch' not in sys.modules; print(evaluation.__all__)"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "'perplexity'" in ran.stdout
