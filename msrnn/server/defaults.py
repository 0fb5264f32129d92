"""Sampling defaults from a model's generation config, for requests without their own."""

from __future__ import annotations

from typing import Any

from msrnn.engine.requests import SamplingParams
from msrnn.errors import UsageError

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
NEUTRAL: dict[str, Any] = {name: getattr(SamplingParams(), name) for name in NAMES}


def sampling_defaults(config: Any) -> dict[str, Any]:
    """The values that a generation config states. `do_sample: false` is temperature 0."""
    found = {name: getattr(config, name, None) for name in NAMES}
    if getattr(config, "do_sample", None) is False:
        found = {"temperature": 0.0, "repetition_penalty": found["repetition_penalty"]}
    stated = {name: value for name, value in found.items() if value is not None}
    if stated.get("top_k") == -1:
        stated["top_k"] = 0
    try:
        SamplingParams(**stated)
    except UsageError as error:
        raise UsageError(f"the model's generation config: {error}; generation_config=none ignores it") from error
    return stated
