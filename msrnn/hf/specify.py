"""From a model and the options of `MultiStateRNN` to the layout of its states."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from msrnn.backends.base import Backend
from msrnn.bound import Bound, layer_bound
from msrnn.core.fingerprint import ARCHITECTURE, ARCHIVED_KEYS, RECALL, UNROTATED, WEIGHTS
from msrnn.core.quantization import parse_state_dtype, state_dtype_name
from msrnn.core.rope import FITTED, ORIGINAL, Gap, Repositioning, Spacing, name_of, spacing
from msrnn.core.slots import LayerShape
from msrnn.core.weights_file import WeightsFile
from msrnn.hf.cache_layers import LayerSetup
from msrnn.hf.inspect import ModelSpec, inspect_model
from msrnn.hf.learned_weights import load_policy_weights
from msrnn.hf.recall_options import (
    add_recall,
    check_recall,
    count_archived,
    find_reach,
    is_paged,
)
from msrnn.hf.state_options import check_chunk, check_partly_bounded, check_unbounded, fitting_gap, layer_backend
from msrnn.hf.state_spec import StateSpec
from msrnn.policy import Policy
from msrnn.recall import Recall
from msrnn.scored import refuse_scored
from msrnn.size import SizeLike, layer_sizes, resolve


def state_spec(
    model: PreTrainedModel,
    policy: str | Policy,
    size: SizeLike,
    *,
    positions: str | Gap = ORIGINAL,
    state_dtype: str | torch.dtype | None = None,
    backend: str = "auto",
    chunk: int | None = None,
    in_blocks: bool = False,
    recall: Recall | None = None,
) -> StateSpec:
    """Check the options and the model, and combine them. `in_blocks`: msrnn splits texts and passes position ids."""
    policy, size = resolve(policy, size)
    quantized = parse_state_dtype(state_dtype)
    if not policy.evicts:
        check_unbounded(state_dtype, positions)
    check_chunk(chunk)
    spec = inspect_model(model)
    if spec.shards is not None:
        refuse_scored(policy, "processes that share a model cannot compute a Python function; use one process")
    linear = [layer is None for layer in spec.layers]
    sizes = layer_sizes(policy, size, spec.windows, linear)
    if size and any(one is None and not skipped for one, skipped in zip(sizes, linear, strict=True)):
        check_partly_bounded(size, quantized, positions)
    bounds = [layer_bound(policy, rows, window) for rows, window in zip(sizes, spec.windows, strict=True)]
    if recall is not None:
        check_recall(recall, bounds, linear)
        bounds = [bound and add_recall(bound, recall) for bound in bounds]
    devices = [layer.shape.device if layer else model.device for layer in spec.layers]
    backends = [layer_backend(backend, policy, *layer) for layer in zip(bounds, devices, strict=True)]
    guests = recall.rows if recall else 0
    spaced = spacing(positions, fitting_gap(spec.config, sizes, guests) if positions == FITTED else 1)
    setups = _setups(spec, backends, spaced, chunk)
    weights = load_policy_weights(spec, policy)
    spec.check_readable(in_blocks)
    return StateSpec(
        model=spec,
        shapes=layer_shapes(spec, bounds, backends, quantized, spaced, weights),
        bounds=bounds,
        setups=setups,
        fingerprint=_fingerprint(spec, policy, sizes, quantized, spaced, recall, weights),
    )


def layer_shapes(
    spec: ModelSpec,
    bounds: Sequence[Bound | None],
    backends: Sequence[Backend],
    quantized: torch.dtype | None,
    spaced: Spacing | None,
    weights: WeightsFile | None = None,
) -> list[LayerShape | None]:
    """The shape of each layer's rows; None for linear attention."""
    networks = weights.networks if weights else [None] * len(spec.layers)
    shapes = [
        layer and replace(layer.shape, state_dtype=quantized, layer=i, network=network)
        for i, (layer, network) in enumerate(zip(spec.layers, networks, strict=True))
    ]
    archiving = [
        (shape, bound) for shape, bound in zip(shapes, bounds, strict=True) if shape and bound and bound.recall
    ]
    if not archiving:
        return shapes
    most = count_archived(archiving)
    return [
        replace(
            shape,
            archived=most,
            reach=find_reach(spec.config, bound, spaced),
            paged=is_paged(shape, bound, backend.name),
        )
        if shape and bound
        else shape
        for shape, bound, backend in zip(shapes, bounds, backends, strict=True)
    ]


def _setups(
    spec: ModelSpec, backends: Sequence[Backend], spaced: Spacing | None, chunk: int | None
) -> list[LayerSetup | None]:
    """The attention setup of each layer; None for linear attention."""
    ropes = spec.ropes if spaced else [None] * len(spec.layers)
    return [
        layer
        and LayerSetup(
            config=spec.config,
            module=weakref.ref(layer.module),
            chunk=chunk or backend.default_chunk,
            backend=backend,
            repositioning=Repositioning(spaced, rope) if spaced and rope else None,
            window=window,
            passes_use_cache=layer.passes_use_cache,
        )
        for layer, backend, rope, window in zip(spec.layers, backends, ropes, spec.windows, strict=True)
    ]


def _fingerprint(
    spec: ModelSpec,
    policy: Policy,
    sizes: list[int | None],
    quantized: torch.dtype | None,
    spaced: Spacing | None,
    recall: Recall | None,
    weights: WeightsFile | None,
) -> dict[str, Any]:
    """The fields that a state must have in common with this model and these options to fit."""
    return {
        **({RECALL: recall.name} if recall else {}),
        **({ARCHIVED_KEYS: UNROTATED} if recall and spaced else {}),
        **({WEIGHTS: weights.digest} if weights else {}),  # a file is known by its content, not by its name
        "policy": policy.without_weights.name,
        "size": sizes[0] if len(set(sizes)) == 1 else sizes,
        "dtype": state_dtype_name(quantized) if quantized else spec.dtype,
        "positions": name_of(spaced),
        ARCHITECTURE: spec.architecture,
        "model": spec.fingerprint,
        "rotary": spec.rope_digest,
        "windows": sorted({window for window in spec.windows if window is not None}),
    }
