"""MultiStateCache: a bounded state for `model.generate(past_key_values=...)`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from msrnn.core.rope import ORIGINAL, Gap
from msrnn.core.state import MultiState
from msrnn.errors import UsageError
from msrnn.hf.cache_layers import OwnedCache
from msrnn.hf.cache_state import OwnState
from msrnn.hf.handover import begin_block, end_block, give_back, hand_over
from msrnn.hf.inspect_layers import host_layers
from msrnn.hf.learned_positions import CheckedLength, NoPositionError, is_past_table
from msrnn.hf.specify import state_spec
from msrnn.hf.state_spec import StateSpec
from msrnn.policy import Policy
from msrnn.size import SizeLike


class MultiStateCache(OwnedCache):
    """A bounded state as a transformers cache, for callers of `model.generate` or `model.forward`.

    The options are those of `MultiStateRNN`, and the model is changed in the same way; `detach()`, or the end of a
    `with` block, restores it. Prompts are padded on the left: other padding is refused. Position ids are the model's
    own. Past the end of a table of learned positions (GPT-2), `model.generate` and `model.forward` raise a `UsageError`
    and read nothing. Two cases still end in torch's own error, since the model looks into its table before it asks the
    cache: `generate` with a prompt that is longer than the table, and `forward` of a model that computes position ids
    from the attention mask (OPT). On a GPU, that error leaves CUDA unusable: check the length of a prompt first.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: str | Policy = "tova",
        size: SizeLike = 512,
        *,
        positions: str | Gap = ORIGINAL,
        state_dtype: str | torch.dtype | None = None,
        backend: str = "auto",
        chunk: int | None = None,
    ) -> None:
        options: Any = {"positions": positions, "state_dtype": state_dtype, "backend": backend, "chunk": chunk}
        spec = state_spec(model, policy, size, **options)
        hand_over(model, self)
        self._build(model, spec)

    @classmethod
    def from_spec(cls, model: PreTrainedModel, spec: StateSpec) -> MultiStateCache:
        """A cache for a model whose attention is msrnn's already."""
        cache = cls.__new__(cls)
        cache._build(model, spec)
        return cache

    def _build(self, model: PreTrainedModel, spec: StateSpec) -> None:
        for name in ("config", "generation_config"):
            if getattr(getattr(model, name, None), "use_cache", None) is False:
                raise UsageError(
                    f"model.{name}.use_cache=False makes generate read the whole text again at every step, which a "
                    f"state that evicts cannot undo: set model.{name}.use_cache = True"
                )
        self.spec = spec
        host = host_layers(spec.model.config)
        self._cached = OwnState(spec, host)
        super().__init__(
            layers=[host[i] if shape is None else spec.layer(i, self._cached) for i, shape in enumerate(spec.shapes)]
        )

    def __repr__(self) -> str:
        empty = self.get_seq_length() == 0
        return f"MultiStateCache({self.spec.summary}, seen={[] if empty else self.state.seen.tolist()})"

    def detach(self) -> None:
        """Restore the model as it was before it was first wrapped, as `MultiStateRNN.detach` does."""
        give_back(self.spec.model.reference())

    def __enter__(self) -> MultiStateCache:
        begin_block(self.spec.model.reference(), self)
        return self

    def __exit__(self, *_: object) -> None:
        end_block(self.spec.model.reference(), self)

    def __deepcopy__(self, memo: dict[int, Any]) -> MultiStateCache:
        """A copy of the state, for the same model."""
        other = copy.copy(self)
        other.layers, other._cached = copy.deepcopy((self.layers, self._cached), memo)
        return other

    def activate_past_recording(self) -> None:
        """Let `crop` take back tokens from now on, as assisted decoding does: the last ones of one forward pass.

        Each pass of several tokens then copies the state.
        """
        if self.spec.hybrid:
            raise UsageError("the linear-attention layers of this model cannot take tokens back: use no draft")
        self._cached.marks = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens, a negative number, after `activate_past_recording`; what they evicted is back."""
        tokens_to_remove = int(tokens_to_remove)  # some versions of transformers give a tensor
        if tokens_to_remove > 0:
            advice = "crop(-3) takes back the last 3 tokens"
            raise UsageError("must be 0 or less", name="tokens_to_remove", value=tokens_to_remove, advice=advice)
        self._cached.take_back(-tokens_to_remove)

    def reset(self) -> None:
        """Make the state empty."""
        self._last = None
        self._cached.reset()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The columns read. Added to a model's position ids, it refuses those beyond the learned positions."""
        columns: int = super().get_seq_length(layer_idx)
        return columns if self.spec.model.last_position is None else CheckedLength(columns, self.spec)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The columns read, as a plain number: a mask counts columns, which have no end."""
        return int(super().get_query_offset(layer_idx))

    @property
    def is_compileable(self) -> bool:
        """False. Refuses to read past the learned positions: generate asks this, and no more, before each forward."""
        if is_past_table(self.spec, self.get_seq_length()):
            try:
                self.spec.check_position(int(self.state.seen.max()))
            except UsageError as error:
                raise NoPositionError(error.message, advice=error.advice) from None
        return False

    @property
    def state(self) -> MultiState:
        """The state that the cache holds, to save, fork or continue from."""
        return self._cached.state
