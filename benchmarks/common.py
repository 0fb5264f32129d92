"""Code that all benchmarks share: the model, its text, and the report of a ratio."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pydoc_data.topics import topics
from statistics import median
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from msrnn.evaluation.environment import environment
from msrnn.hf.loading import load


def model_and_tokens(count: int) -> tuple[PreTrainedModel, Tensor]:
    """The small default model in float32 and [1, count] tokens of Python's own manual."""
    model, tokenizer = load(device="cpu", dtype="float32", on_convert=print)
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(text, verbose=False, return_tensors="pt")["input_ids"]
    assert ids.shape[1] >= count, f"the text has only {ids.shape[1]} tokens"
    return model, ids[:, :count]


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def report(question: str, measured: dict[str, list[float]], unit: str, target: float | None = None) -> None:
    """Medians, their ratio to the first, and the environment, printed as a line of text and a line of JSON."""
    medians = {name: median(values) for name, values in measured.items()}
    baseline, *_, mine = medians.values()
    ratio = mine / baseline
    summary = ", ".join(f"{name} {value:.4g} {unit}" for name, value in medians.items())
    goal = "" if target is None else f" (target: at most {target:g}, {'met' if ratio <= target else 'MISSED'})"
    print(f"{question}: {summary}; ratio {ratio:.3f}{goal}")
    print(json.dumps({"question": question, "unit": unit, **measured, "ratio": round(ratio, 4), **environment()}))
