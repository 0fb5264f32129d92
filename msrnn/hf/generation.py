"""`generate` over a bounded state: transformers' own loop, arguments and result; msrnn does prefill and decode steps.

`generate` runs on a shallow copy of the user's model: it shares the weights, but its forward passes over the cache of
this call go to `Continuation`. Forward passes over other caches (as in classifier-free guidance) go to the model.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from msrnn.core.state import MultiState, each
from msrnn.errors import UsageError
from msrnn.hf.cache_layers import OwnedCache, OwnedLayer
from msrnn.hf.cache_state import CachedState
from msrnn.hf.sequence_ends import SequenceEnds, mask_generated
from msrnn.hf.state_spec import StateSpec

_OWN_INPUTS = ("attention_mask", "position_ids", "cache_position")  # tensors of a forward pass that are not data


class Reader(Protocol):
    """The methods of a `MultiStateRNN` that `Continuation` uses."""

    spec: StateSpec

    def read(self, input_ids: Tensor, state: MultiState) -> Tensor: ...

    def read_prompt(self, input_ids: Tensor, state: MultiState, mask: Tensor | None, rest: int = 0) -> Tensor: ...

    def read_answer(self, input_ids: Tensor, state: MultiState, mask: Tensor | None) -> Tensor: ...

    def step(self, input_ids: Tensor, state: MultiState, attention_mask: Tensor | None = None) -> Tensor: ...

    def select(self, state: MultiState, sequences: Tensor) -> MultiState: ...


class Continuation:
    """The forward passes of one call of `generate`, over a prompt of `prompt` columns.

    The prompt is read once. Without beams, the caller's state itself decodes, and sequences that have ended are
    masked: their states stay as they were at their end. With beams or several answers, each sequence decodes in
    `copies` copies. Drafts of assisted decoding are read after a mark, and what is not accepted is taken back.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rnn: Reader,
        state: MultiState,
        prompt: int,
        copies: int,
        ends: SequenceEnds | None,
    ) -> None:
        self.model, self.rnn, self.state, self.copies, self.ends = model, rnn, state, copies, ends
        self.prompt = prompt
        self.cache = ContinuedCache(self)
        self.cached: CachedState | None = None  # the state that decodes, once the prompt is read
        self.fed: list[Tensor] = []  # generated tokens that were read, [B · copies, T] each
        self.drafted = 0  # tokens of a draft that were read, and neither accepted nor taken back yet

    def __call__(self, ids: Tensor, kwargs: dict[str, Any]) -> Any:
        """One forward pass of `generate` over tokens [B · copies, T]."""
        other = [name for name, value in kwargs.items() if isinstance(value, Tensor) and name not in _OWN_INPUTS]
        if other:
            raise UsageError(
                f"{', '.join(other)}: a state reads token ids only, no images or other inputs; pass input_ids"
            )
        if self.cached is None:
            return self._prompt(ids, kwargs)
        self.fed.append(ids)
        if ids.shape[1] == 1:
            self.state.unmark()
            return self._decode(ids, kwargs)
        return self._output(self._read_draft(ids, 1) if self.cache.drafts else self._read(ids))

    def _prompt(self, ids: Tensor, kwargs: dict[str, Any]) -> Any:
        mask = kwargs.get("attention_mask")
        ids, draft = ids[:, : self.prompt], ids[:, self.prompt :]
        ids, mask = ids[:: self.copies], mask if mask is None else mask[:: self.copies, : ids.shape[1]]
        # Hidden states come from the model's own forward pass. Beams go back to the state before the last token.
        stepping = bool(kwargs.get("output_hidden_states")) or self.copies > 1
        before = ids.shape[1] - 1 if stepping else ids.shape[1]
        logits = None
        if before:
            part = None if mask is None else mask[:, :before]
            logits = self.rnn.read_prompt(ids[:, :before], self.state, part, rest=ids.shape[1] - before)
        decoding = self.state
        if self.copies > 1:
            decoding = self.rnn.select(self.state, each(self.state.batch_size, self.copies))
        # transformers counts the columns of this call.
        self.cached = CachedState(decoding, columns=before, recalling=self.rnn.spec.recalling)
        self.cache.layers = self.rnn.spec.cache(self.cached).layers
        if stepping:
            return self._decode(ids[:, -1:].repeat_interleave(self.copies, 0), kwargs)
        assert logits is not None
        if draft.shape[1]:
            self.fed.append(draft)
            logits = torch.cat([logits, self._read_draft(draft, 0)], dim=1)
        return self._output(logits)

    def _read_draft(self, ids: Tensor, certain: int) -> Tensor:
        """Read a draft after tokens that are certain -> the logits of all."""
        assert self.cached is not None
        self.state.mark()
        logits = self.rnn.read(ids, self.state)
        self.cached.report(ids.shape[1])
        self.drafted = ids.shape[1] - certain
        return logits

    def take_back(self, count: int) -> None:
        """Take back the last tokens of a draft; the others are accepted."""
        assert self.cached is not None
        if count:
            self.state.rewind(count)
            self.cached.report(-count)
            self.fed[-1] = self.fed[-1][:, :-count]
        self.drafted = 0

    def stop(self) -> None:
        """After the call, also one that was interrupted: take back a draft that nobody has accepted."""
        if self.drafted and self.state.whole:
            self.take_back(self.drafted)
        self.state.unmark()

    def _decode(self, ids: Tensor, kwargs: dict[str, Any]) -> Any:
        assert self.cached is not None
        mask, state = self._mask_ended(), self.cached.state
        if not kwargs.get("output_hidden_states"):
            logits = self.rnn.step(ids, state, mask)
            self.cached.report(1)
            return self._output(logits)
        for layer in self.cache.layers:
            if isinstance(layer, OwnedLayer):
                layer.real = None if mask is None else mask.bool()
        kwargs = {**kwargs, "attention_mask": None, "position_ids": state.seen[:, None]}
        with state.reading(1):
            out = self.model(ids, **kwargs)
        self.cached.report(1)
        return out

    def _mask_ended(self) -> Tensor | None:
        """The mask [B, 1], 0 for sequences that ended before the column that is read next; None for one sequence."""
        if self.cached is None or self.ends is None or self.ends.columns is None or self.state.batch_size == 1:
            return None
        return (self.cached.columns < self.ends.columns)[:, None].long()

    def _read(self, ids: Tensor) -> Tensor:
        assert self.cached is not None
        logits = self.rnn.read_answer(ids, self.cached.state, None)
        self.cached.report(ids.shape[1])
        return logits

    def _output(self, logits: Any) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(logits=logits, past_key_values=self.cache)

    def finish(self, out: Any, prompt: int, pad: int) -> None:
        """Let the caller's state read what it has not read of the result: the last token, or with beams the answer.

        Columns after the end of a sequence become `pad`, which transformers itself writes only where there is a stop
        token. The cache is taken out of the result: the state has read one token more, and is the caller's own.
        """
        out.past_key_values = None
        if self.copies > 1:
            new = out.sequences[:, prompt - 1 :]
            real = torch.cat([torch.ones_like(new[:, :1]), mask_generated(out, prompt, self.ends)], dim=1)
            self.rnn.read_answer(new.masked_fill(real == 0, 0), self.state, real)
            return
        generated, real = out.sequences[:, prompt:], mask_generated(out, prompt, self.ends)
        read = torch.cat(self.fed, dim=1) if self.fed else generated[:, :0]
        expected = generated[:, :-1]
        if read.shape != expected.shape or bool(((read != expected) & (real[:, :-1] == 1)).any()):
            self.state.whole = False
            raise UsageError("this generation mode feeds other tokens than it returns: call generate without a state")
        out.sequences[:, prompt:] = generated.masked_fill(real == 0, pad)
        if bool(real[:, -1].any()):
            self.rnn.step(generated[:, -1:].masked_fill(real[:, -1:] == 0, 0), self.state, real[:, -1:])


class ContinuedCache(OwnedCache):
    """The cache of one call of `generate`, which takes back what is not accepted of a draft."""

    def __init__(self, continuation: Continuation) -> None:
        super().__init__(layers=[])
        self.continuation, self.drafts = continuation, False

    def activate_past_recording(self) -> None:
        self.drafts = True

    def crop(self, tokens_to_remove: int) -> None:
        self.continuation.take_back(int(-tokens_to_remove))  # some versions of transformers give a tensor


def redirect_forward(model: PreTrainedModel, continuation: Continuation) -> Any:
    """A shallow copy of the model whose forward passes go to `continuation`; the model itself is unchanged."""

    @wraps(model.forward)
    def forward(input_ids: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if input_ids is None or args or kwargs.get("past_key_values") is not continuation.cache:
            return model(input_ids, *args, **kwargs)
        return continuation(input_ids, kwargs)

    other: Any = copy.copy(model)
    other.forward = forward
    for hooks in ("_forward_hooks", "_forward_pre_hooks"):  # they run once, when the model itself is called
        setattr(other, hooks, OrderedDict())
    return other
