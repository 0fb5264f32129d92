"""The seam with transformers: cache layers that own their keys, an attention function and a mask, registered by name.

`update()` hands the new keys on with their owner attached; the attention function finds the owner and lets it append,
attend, observe and evict. Nothing is patched, hooked or copied, and models that did not ask are not affected.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from msrnn.attention import Record, attend, attend_unbounded, plain_attention
from msrnn.positions import Places
from msrnn.scoring import Scoring
from msrnn.slots import Growing, Memory

NAME = "msrnn"


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, H, T, D], key and value [B, K, T, D] -> [B, T, H, D].

    Dropout is not among the arguments that matter: a state that forgets is for inference. torch.compile leaves it alone
    and compiles the rest of the layer: kernels of our own gain nothing, and it would compile anew at every count.
    """
    scoring = Scoring(scaling if scaling is not None else query.shape[-1] ** -0.5, softcap, s_aux)
    owner = getattr(key, "owner", None)
    if position_bias is not None:
        raise ValueError("this model adds a bias by distance to its scores, which msrnn does not know how to keep")
    if owner is None:
        if attention_mask is None and not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            attention_mask = query.new_ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool)  # as an image's
        return plain_attention(query, key, value, attention_mask, scoring).contiguous(), None
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        raise ValueError("bounded states carry no gradient: call the model under torch.no_grad()")
    return owner.attend(query, key, value, _real(attention_mask), scoring).contiguous(), None


def _real(mask: Tensor | None) -> Tensor | None:
    """[B, T], False where padding: a token sees itself unless it is padding, so it is the mask's diagonal."""
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        raise TypeError(f"attention mask of {mask.dtype}: pass a 2-D mask of ones and zeros (1 for a token)")
    return mask[:, 0].diagonal(dim1=-2, dim2=-1)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class OwnedLayer(CacheLayerMixin):
    """What transformers sees of one layer. Columns are counted from where the cache was handed over."""

    is_compileable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, config: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.config = config
        self.columns = 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        active = self.config._attn_implementation
        if active != NAME:
            raise ValueError(
                f"the model's attention is now {active!r}, which cannot read bounded states: "
                f"call model.set_attn_implementation({NAME!r})"
            )
        self.lazy_initialization(key_states, value_states)
        self.columns += key_states.shape[2]
        key_states.owner = self  # type: ignore[attr-defined]
        return key_states, value_states

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, self.columns

    def get_max_length(self) -> int:
        return -1


class OwnedCache(Cache):
    """A cache whose layers own their keys; like the attention that follows, none of torch.compile's business."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(self, *args: Any, **kwargs: Any) -> Any:
        return super().update(*args, **kwargs)


class StateLayer(OwnedLayer):
    """A layer's memory as transformers' cache layer; without one, it is made for the first batch that comes."""

    def __init__(
        self,
        config: Any,
        memory: Memory | Callable[[int], Memory],
        chunk: int,
        backend: str,
        columns: int = 0,
        record: Record | None = None,
        places: Places | None = None,
    ) -> None:
        super().__init__(config)
        self.memory, self.chunk, self.backend, self.columns, self.record = memory, chunk, backend, columns, record
        self.places = places

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if not isinstance(self.memory, Memory):
            self.memory = self.memory(key_states.shape[0])
        super().lazy_initialization(key_states, value_states)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, scoring: Scoring) -> Tensor:
        memory = self.memory
        assert isinstance(memory, Memory)
        if query.shape[0] != memory.batch_size:
            raise ValueError(f"a batch of {query.shape[0]} does not fit a state of {memory.batch_size} rows")
        if key.dtype != memory.dtype:
            raise ValueError(
                f"keys of {key.dtype} do not fit a state of {memory.dtype}: leave autocast, or hand the model to msrnn "
                "again once it is cast"
            )
        if isinstance(memory, Growing):
            return attend_unbounded(memory, query, key, value, real, scoring)
        if self.places is not None:
            scoring = replace(scoring, places=self.places)
        with torch.cuda.device_of(query):  # kernels are launched on the current device
            return attend(memory, query, key, value, real, scoring, self.chunk, self.backend, self.record)

    def reset(self) -> None:
        self.columns = 0
        if isinstance(self.memory, Memory):
            self.memory.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if isinstance(self.memory, Memory):
            self.memory.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if isinstance(self.memory, Memory):
            self.memory = self.memory.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if isinstance(self.memory, Memory):
            self.batch_select_indices(torch.arange(self.memory.batch_size).repeat_interleave(repeats))

    def crop(self, _: int) -> None:
        raise ValueError("a bounded state cannot take tokens back, as assisted decoding asks: use a full cache for it")

    def offload(self) -> None:
        raise ValueError("a bounded state stays on its device: it is small, do not offload it")


class LinearLayer:
    """A linear-attention layer's own cache, whose size is fixed already, carried along in a `MultiState`."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    @property
    def nbytes(self) -> int:
        states = [*self.layer.conv_states.values(), *self.layer.recurrent_states.values()]
        return sum(state.nbytes for state in states if state is not None)

    def reset(self) -> None:
        self.layer.reset()

    def select(self, rows: Tensor) -> LinearLayer:
        other = copy.deepcopy(self.layer)
        other.reorder_cache(rows)
        return LinearLayer(other)
