"""One layer read by `attend`, for tests of what must not depend on backend, chunk or neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from msrnn.backends import resolve_backend
from msrnn.bound import Bound
from msrnn.core.rope import Repositioning
from msrnn.core.scores import Scoring
from msrnn.core.slots import LayerShape, Slots
from msrnn.layer import attend

BACKENDS = ["torch", "numba", "triton"]


def read(slots: Slots, tokens: tuple[Tensor, ...], scoring: Scoring, name: str, chunk: int, steps: int = 0) -> Tensor:
    """Outputs [B, T, H, Dv] of query [B, H, T, D], key and value [B, K, T, D]; the last `steps` tokens one by one."""
    length, backend = tokens[0].shape[2], resolve_backend(name, slots.keys.device)
    outputs = []
    for piece in (slice(0, length - steps), *(slice(i, i + 1) for i in range(length - steps, length))):
        query, key, value = (x[:, :, piece] for x in tokens)
        position = slots.advance(query.shape[2], None)
        outputs.append(attend(slots, query, key, value, position, scoring, chunk, backend))
    return torch.cat(outputs, dim=1)


def random_tokens(
    batch: int, heads: int, kv_heads: int, length: int, dim: int, device: str, seed: int = 0
) -> tuple[Tensor, ...]:
    """Query [B, H, T, D], key and value [B, K, T, D]."""
    draw = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(batch, h, length, dim, generator=draw, dtype=torch.float32).to(device)
        for h in (heads, kv_heads, kv_heads)
    )


def shape_and_scoring(
    device: str,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    softcap: float | None = None,
    sinks: bool = False,
    state_dtype: torch.dtype | None = None,
    repositioning: Repositioning | None = None,
) -> tuple[LayerShape, Scoring]:
    """A small layer; options that are not given are those of a plain one."""
    sink = torch.linspace(-1, 1, heads, device=device) if sinks else None
    shape = LayerShape(heads, kv_heads, dim, dim, dtype, torch.device(device), state_dtype)
    return shape, Scoring(dim**-0.5, softcap, sink, repositioning)


class Fenced:
    """Slots whose every buffer lies between two strips that nobody may write."""

    STRIP = 4096

    def __init__(self, batch: int, shape: LayerShape, bound: Bound) -> None:
        self.slots = Slots(batch, shape, bound)
        self.fields: list[Tensor] = []
        for name, buffer in self.slots.tensors().items():
            field = torch.full((buffer.numel() + 2 * self.STRIP,), 77, device=buffer.device).to(buffer.dtype)
            inside = field[self.STRIP : -self.STRIP].view(buffer.shape)
            inside.copy_(buffer)
            setattr(self.slots, name, inside)
            self.fields.append(field)

    def check(self) -> None:
        for field in self.fields:
            for strip in (field[: self.STRIP], field[-self.STRIP :]):
                assert (strip.float() == 77).all(), "written outside of its buffer"


def held(slots: Slots) -> list[Tensor]:
    """What is held, in the order of the text: positions, then everything else that belongs to them."""
    order = slots.position.argsort(-1)
    position = slots.position.gather(-1, order)
    rows = [
        t.gather(2, order[..., None].expand(t.shape)).masked_fill((position < 0)[..., None], 0)
        for t in slots.dequantized()
    ]
    numbers = [
        t.gather(-1, order).masked_fill(position < 0, 0) for t in (slots.importance, slots.row_weight) if t is not None
    ]
    return [position, *rows, *numbers]
