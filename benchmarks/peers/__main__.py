"""Time the decode steps of other libraries on the same machine, each in its own virtual environment below `.peers`.

python -m benchmarks.peers [--context 3072] [--size 512]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.common import model_and_tokens
from msrnn.evaluation.environment import ROOT, environment
from msrnn.hf.loading import small_model

PEERS: dict[str, list[str]] = {"kvpress": ["torch==2.13.0", "kvpress==0.5.5", "transformers==5.2.0"]}


def installed_python(peer: str) -> Path | None:
    """The peer's Python, installed once; None, and a message, where it cannot be installed."""
    folder = ROOT / ".peers" / peer
    if (folder / "installed").exists():
        return folder / "bin" / "python"
    print(f"installing {peer} into {folder.relative_to(ROOT)}", flush=True)
    steps = [[sys.executable, "-m", "venv", str(folder)], [str(folder / "bin" / "pip"), "install", "-q", *PEERS[peer]]]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{peer}: skipped, it cannot be installed here ({done.stderr.strip().splitlines()[-1]})")
            return None
    (folder / "installed").touch()
    return folder / "bin" / "python"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=3072)
    parser.add_argument("--size", type=int, default=512)
    args = parser.parse_args()
    for peer in PEERS:
        python = installed_python(peer)
        if python is None:
            continue
        _, ids = model_and_tokens(args.context + 512)
        with tempfile.TemporaryDirectory() as folder:
            tokens = Path(folder) / "tokens.npy"
            np.save(tokens, ids[0].numpy())
            script = ROOT / "benchmarks" / "peers" / f"{peer}_decode.py"
            words = ["--model", str(small_model()), "--tokens", str(tokens)]
            words += ["--context", str(args.context), "--size", str(args.size)]
            done = subprocess.run([python, script, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{peer} failed:\n{done.stderr}")
        result = json.loads(done.stdout.strip().splitlines()[-1])
        print(
            f"{peer} {result['version']}, a step at size {args.size} after {args.context} tokens: unmodified "
            f"{result['unmodified_ms']} ms, {peer} {result['bounded_ms']} ms; ratio {result['ratio']:.3f}"
        )
        print(json.dumps({**environment(), **result}))


if __name__ == "__main__":
    main()
