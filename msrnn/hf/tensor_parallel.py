"""Models that transformers has split among processes (`tp_plan="auto"` under torchrun): each has some of the heads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from msrnn.core.shards import Shards, check_same
from msrnn.core.slots import LayerShape
from msrnn.errors import LostRankError, UsageError

_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13


@dataclass(frozen=True, eq=False)
class ProcessShards:
    """The processes of a group, one for each shard."""

    group: dist.ProcessGroup
    rank: int
    count: int
    backend: str  # that carries tensors of the model's device

    def __deepcopy__(self, _: dict[int, Any]) -> ProcessShards:
        return self

    @property
    def capturable(self) -> bool:
        return self.backend == "nccl"

    def sum(self, tensor: Tensor) -> Tensor:
        with naming_lost_ranks(self):
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        mine = tensor.contiguous().view(torch.uint8)  # backends do not know every dtype
        every = mine.new_empty(self.count * mine.shape[0], *mine.shape[1:])
        with naming_lost_ranks(self):
            _all_gather(every, mine, group=self.group)
        return torch.cat(every.view(tensor.dtype).chunk(self.count), dim)


@contextmanager
def naming_lost_ranks(shards: Shards | None) -> Iterator[None]:
    """Turn a communication error into LostRankError."""
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, dist.DistError) or "gloo" in str(error)
        if shards is None or not lost or isinstance(error, LostRankError):
            raise
        reason = str(error).splitlines()[0]
        raise LostRankError(
            f"rank {shards.rank} of {shards.count}: another process of this job has ended or does not answer ({reason})"
        ) from error


def shards_of(model: PreTrainedModel) -> Shards | None:
    """The processes that share a model; None: this one has all of it. Refuses other ways to divide a model."""
    mesh: Any = getattr(model, "_device_mesh", None)
    if mesh is None or (getattr(model, "_tp_size", None) or 1) == 1:
        return None
    if mesh.ndim > 1 and mesh.size() != model._tp_size:
        raise UsageError(
            f"a model on a mesh of {dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))}: msrnn supports tensor "
            "parallelism alone"
        )
    group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
    shards = ProcessShards(group, dist.get_rank(group), dist.get_world_size(group), _backend(group, model.device))
    if model.device.type == "cuda" and shards.backend == "gloo":
        raise UsageError(
            "processes that share a model on GPUs must speak by NCCL, not by gloo: init_process_group('nccl')"
        )
    return shards


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend for a device: a group may have several, as in "cpu:gloo,cuda:nccl"."""
    parts = [part.partition(":") for part in dist.get_backend_config(group).split(",")]
    return {kind: name for kind, _, name in parts}.get(device.type, "")


def check_heads_divide(model: PreTrainedModel, config: Any, shards: Shards) -> None:
    """Refuse a number of processes that does not divide the heads: some would have parts of heads."""
    for what, name in (("query heads", "num_attention_heads"), ("KV heads", "num_key_value_heads")):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % shards.count:
            raise UsageError(
                f"{type(model).__name__} has {heads} {what}, which {shards.count} processes cannot share equally: "
                "use a number of processes that divides it"
            )


def check_groups_divide(module: nn.Module, shape: LayerShape) -> None:
    """Refuse a layer whose KV heads several processes have, each with some of their query heads.

    Importances and recalled rows of a KV head depend on all of its query heads.
    """
    expected, found = getattr(module, "num_key_value_groups", None), shape.heads // shape.kv_heads
    if isinstance(expected, int) and found != expected:
        raise UsageError(
            f"{type(module).__name__} has {expected} query heads for each KV head, and a process has {found} of them: "
            "use fewer processes, so that each has whole KV heads"
        )


def check_same_input(
    input_ids: Tensor, shards: Shards | None, samples: bool = False, recall_every: int | None = None
) -> None:
    """Refuse tokens, blocks that recall, and random numbers, in which the processes that share a model differ."""
    if shards is None:
        return
    options = [*input_ids.shape, *repr(recall_every).encode()]  # as a text: nothing has checked it yet
    given = torch.cat([torch.tensor(options, device=input_ids.device), input_ids.flatten()])
    check_same(given, shards, "each process reads other tokens, or recalls in other blocks: give all of them the same")
    if samples:
        device = input_ids.device
        numbers = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        problem = "each process would sample other tokens: call torch.manual_seed with one number in all of them"
        check_same(numbers.to(device), shards, problem)


def is_split(module: nn.Module) -> bool:
    """Whether the weights of a module are divided among processes."""
    return any(
        isinstance(weight, DTensor) and any(not placement.is_replicate() for placement in weight.placements)
        for weight in module.parameters()
    )


def own_weight(weight: Tensor) -> Tensor:
    """This process's part of a weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def whole_weight(weight: Tensor) -> Tensor:
    """A weight that may be divided among processes, which must all ask for it."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight
