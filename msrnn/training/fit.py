"""Train networks on decisions; an interrupted training continues from its checkpoint to the same result."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from msrnn.core.atomic import write_atomically
from msrnn.training.decisions import Decisions
from msrnn.training.losses import compute_loss, counts_of, sum_lost
from msrnn.training.networks import Networks

RATE = 3e-3  # of learning, at its highest
BATCH = 16  # moments of each size in a step
CHECKPOINT = 50  # steps from one checkpoint to the next
_DECAY = 1e-2  # of the parameters


def fit_networks(
    networks: Networks,
    decisions: Sequence[Decisions],
    steps: int,
    seed: int,
    checkpoint: Path | None = None,
    on_step: Callable[[int], object] = lambda _: None,
) -> None:
    """Change the networks of a stack so that they lose little. `decisions` are those of each size."""
    references = [compute_references(part) for part in decisions]
    for parameter in networks.trained:
        parameter.requires_grad_()
    optimizer = AdamW(networks.trained, lr=RATE, weight_decay=_DECAY)
    done = _load(checkpoint, networks, optimizer)
    on_step(done)
    for step in range(done, steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * find_rate(step, steps)
        optimizer.zero_grad()
        for part, reference, index in zip(decisions, references, _draw(decisions, seed, step), strict=True):
            batch = part.at(index.to(part.inputs.device))
            loss = compute_loss(networks.score(batch), batch.change, reference) / len(decisions)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(networks.trained, 1.0)
        optimizer.step()
        if checkpoint is not None and (step + 1) % CHECKPOINT == 0 and step + 1 < steps:
            _save(checkpoint, step + 1, networks, optimizer)
        on_step(1)
    for parameter in networks.trained:
        parameter.requires_grad_(False)


def compute_references(decisions: Decisions) -> list[Tensor]:
    """What the policy loses without networks [L], for each share that is evicted."""
    score, change = decisions.importance + decisions.norm, decisions.change
    counts = counts_of(score.shape[-1])
    return [sum_lost(score, change, evicted).mean((0, 2)).clamp(min=1e-12) for evicted in counts]


def find_rate(step: int, steps: int) -> float:
    """The share of the highest learning rate: a short rise, then half a cosine down to 0."""
    rise = min(20, steps)
    return min(1.0, (step + 1) / rise) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _draw(decisions: Sequence[Decisions], seed: int, step: int) -> list[Tensor]:
    """Moments of each size for one step; they depend on nothing but the seed and the step."""
    draw = torch.Generator().manual_seed((seed << 24) + step)
    return [torch.randint(0, part.moments, (BATCH,), generator=draw) for part in decisions]


def _save(path: Path, step: int, networks: Networks, optimizer: AdamW) -> None:
    content = {"step": step, "networks": networks.tensors(), "optimizer": optimizer.state_dict()}
    write_atomically(path, lambda to: torch.save(content, to))


def _load(path: Path | None, networks: Networks, optimizer: AdamW) -> int:
    """Continue from a checkpoint -> the steps that are done; 0 if there is none, or if it is damaged."""
    if path is None or not path.is_file():
        return 0
    try:
        content: dict[str, Any] = torch.load(path, map_location=networks.mean.device, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError):
        return 0
    with torch.no_grad():
        for name, tensor in networks.tensors().items():
            tensor.copy_(content["networks"][name])
    optimizer.load_state_dict(content["optimizer"])
    return int(content["step"])
