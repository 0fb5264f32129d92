"""What every benchmark shares: the model, its text, the unmodified baseline, and the setting beside each figure."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.models import load

ROOT = Path(__file__).parent.parent


def model_and_tokens(count: int) -> tuple[PreTrainedModel, Tensor]:
    """The small default model in float32 and [1, count] tokens of the text that every Python carries."""
    model, tokenizer = load(device="cpu", dtype="float32", on_convert=print)
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(text, verbose=False, return_tensors="pt")["input_ids"]
    assert ids.shape[1] >= count, f"the text has only {ids.shape[1]} tokens"
    return model, ids[:, :count]


@contextmanager
def unmodified(model: PreTrainedModel) -> Iterator[None]:
    """The model as transformers runs it by default."""
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def report(question: str, measured: dict[str, list[float]], unit: str, target: float | None = None) -> None:
    """Medians, their ratio to the first, and the setting, as one line for people and one of JSON."""
    medians = {name: median(values) for name, values in measured.items()}
    baseline, *_, mine = medians.values()
    ratio = mine / baseline
    told = ", ".join(f"{name} {value:.4g} {unit}" for name, value in medians.items())
    goal = "" if target is None else f" (at most {target:g} asked: {'met' if ratio <= target else 'MISSED'})"
    print(f"{question}: {told}; ratio {ratio:.3f}{goal}")
    print(json.dumps({"question": question, "unit": unit, **measured, "ratio": round(ratio, 4), **setting()}))


def setting() -> dict[str, Any]:
    packages = ("torch", "transformers", "numba", "numpy")
    return {
        "machine": f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "commit": _git("describe", "--always", "--dirty"),
    }


def _processor() -> str:
    lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout.splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model name")]
    return f"{platform.machine()} {names[0] if names else platform.processor()}".strip()


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
