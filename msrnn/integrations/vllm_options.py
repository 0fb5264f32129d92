"""The options of msrnn inside vLLM: what `--additional-config '{"msrnn": {"policy": "tova", "size": 512}}'` says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msrnn.backends import BACKENDS
from msrnn.bound import Bound, layer_bound
from msrnn.errors import UsageError
from msrnn.size import resolve

KEY = "msrnn"  # in vLLM's additional_config
FIELDS = ("policy", "size", "positions", "backend")
ORIGINAL = "original"


@dataclass(frozen=True)
class Options:
    """What every attention layer of a model in vLLM holds, and which backend computes it."""

    bound: Bound
    backend: str = "auto"

    @classmethod
    def parse(cls, given: Any) -> Options:
        """Read the options as users write them. `policy` and `size` are required."""
        if not isinstance(given, Mapping):
            raise UsageError("must be a mapping", name=KEY, value=given, advice=_EXAMPLE)
        unknown = sorted(str(name) for name in given if name not in FIELDS)
        if unknown:
            message = f"has unknown fields; there are {', '.join(FIELDS)}"
            raise UsageError(message, name=KEY, value=unknown, advice="leave them out")
        missing = [name for name in ("policy", "size") if name not in given]
        if missing:
            raise UsageError(f"{' and '.join(missing)} missing", name=KEY, value=dict(given), advice=_EXAMPLE)
        if (positions := given.get("positions", ORIGINAL)) != ORIGINAL:
            raise UsageError(
                "vLLM passes on keys that are rotated already, and msrnn cannot rotate them again there",
                name="positions",
                value=positions,
                advice=f"use {ORIGINAL!r}, or msrnn's own engine",
            )
        if (backend := given.get("backend", "auto")) not in BACKENDS:
            raise UsageError(f"must be one of {', '.join(BACKENDS)}", name="backend", value=backend)
        return cls(_read_bound(given["policy"], given["size"]), backend)


_EXAMPLE = 'write {"policy": "tova", "size": 512}'


def _read_bound(policy: Any, size: Any) -> Bound:
    value, rows = resolve(policy, size)
    if value.learned:
        raise UsageError("learned row weights cannot be used in vLLM", name="policy", value=value.name)
    if rows is not None and (rows.budget is not None or not isinstance(rows.rows, int)):
        advice = "give one number of KV rows, for all layers"
        raise UsageError("vLLM's pages have one size in all layers", name="size", value=rows.name, advice=advice)
    bound = layer_bound(value, rows.rows if rows is not None and isinstance(rows.rows, int) else None, None)
    if bound is None:
        raise UsageError("bounds nothing", name="policy", value=value.name, advice=f"leave {KEY!r} out")
    return bound


def read_options(additional_config: Any) -> Options | None:
    """The options in vLLM's `additional_config`; None where msrnn is not asked for."""
    if not isinstance(additional_config, Mapping) or KEY not in additional_config:
        return None
    return Options.parse(additional_config[KEY])
