"""The learned row weights of a policy: its file is read and checked when a model is wrapped."""

from __future__ import annotations

from dataclasses import replace

import torch

from msrnn.core.buffers import LayerShape
from msrnn.core.rope import Rope
from msrnn.core.shards import check_same
from msrnn.core.weights_file import HeadShape, WeightsFile, load_weights
from msrnn.errors import UsageError
from msrnn.hf.inspect import ModelSpec
from msrnn.hf.inspect_layers import rotates
from msrnn.policy import Policy


def load_policy_weights(spec: ModelSpec, policy: Policy) -> WeightsFile | None:
    """The row weights of a policy for a model, on the devices of its layers; None: the policy has no file."""
    if not policy.learned or policy.weights is None:
        return None
    found = load_weights(policy.weights, head_shapes(spec), spec.rounded_fingerprint, spec.architecture)
    if spec.shards is not None:
        digest = torch.frombuffer(bytearray.fromhex(found.digest), dtype=torch.uint8)
        problem = f"policy {policy.name!r}: the processes have read other row weights"
        check_same(digest.to(spec.model.device), spec.shards, problem)
    networks = [
        layer and network and replace(network.on(layer.shape.device), rope=rope)
        for layer, network, rope in zip(spec.layers, found.networks, find_ropes(spec, policy), strict=True)
    ]
    return found._replace(networks=networks)


def head_shapes(spec: ModelSpec) -> list[HeadShape | None]:
    """The KV heads of each layer, in all processes that share the model; None: a layer without KV rows."""
    return [_head_shape(layer.shape) if layer else None for layer in spec.layers]


def _head_shape(shape: LayerShape) -> HeadShape:
    processes = shape.shards.count if shape.shards else 1
    return HeadShape(shape.kv_heads * processes, shape.key_dim, shape.value_dim)


def find_ropes(spec: ModelSpec, policy: Policy) -> list[Rope | None]:
    """How each layer rotates its keys, which is undone for the networks; None: it does not."""
    if not rotates(spec.model):
        return [None] * len(spec.layers)
    try:
        return spec.ropes
    except UsageError as error:
        reason = f"policy {policy.name!r} needs keys as they were before their rotation, and that is not known"
        raise UsageError(f"{reason} ({error.message})", advice="use a policy without a file") from error
