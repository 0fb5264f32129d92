"""`generate` over a bounded state: transformers' own loop, arguments and result; msrnn reads the prompt and steps.

The model that generates is a twin of the user's: the same weights, but its forward passes over the cache of this call
go to `Continuation`. Whatever else calls the model meanwhile (guidance, say) gets the model's own forward pass.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria
from transformers.modeling_outputs import CausalLMOutputWithPast

from msrnn.core.state import MultiState, each
from msrnn.errors import UsageError
from msrnn.hf.cache import OwnedCache, OwnedLayer
from msrnn.hf.state_spec import Plan

_ROLLBACK = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
_UNSUPPORTED = {
    "position_ids": "a state counts the positions of its tokens itself; leave it out",
    "past_key_values": "the state is the cache; pass it as state=",
    "inputs_embeds": "a state reads token ids; pass input_ids",
    "cache_implementation": "the state is the cache; leave it out",
    "output_attentions": "a bounded state has no fixed columns; msrnn.trace gives eviction times",
}
_OWN_INPUTS = ("attention_mask", "position_ids", "cache_position")  # tensors of a forward pass that are not data
_WHOLE_BATCH = (MaxLengthCriteria, MaxTimeCriteria)  # end all rows at once


class Reader(Protocol):
    """Who reads and steps: a `MultiStateRNN`."""

    plan: Plan

    def read(
        self, input_ids: Tensor, state: MultiState, attention_mask: Tensor | None = None, last_only: bool = False
    ) -> Tensor: ...

    def step(self, input_ids: Tensor, state: MultiState) -> Tensor: ...

    def select(self, state: MultiState, rows: Tensor) -> MultiState: ...


class Settings:
    """The generation settings of one call, as transformers resolves them: the call, its config, the model's config."""

    def __init__(self, model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
        self.model, self.kwargs = model, kwargs

    def __getitem__(self, name: str) -> Any:
        if name in self.kwargs:  # None is a value: eos_token_id=None generates past every end
            return self.kwargs[name]
        configs = (self.kwargs.get("generation_config"), self.model.generation_config)
        found = (getattr(config, name, None) for config in configs)
        return next((value for value in found if value is not None), None)

    def check(self) -> None:
        """Refuse what a state cannot do, before anything is read."""
        for name in _ROLLBACK:
            if self[name]:
                raise UsageError(f"{name}: assisted decoding takes tokens back, and a state that evicts cannot")
        for name, reason in _UNSUPPORTED.items():
            if self[name] is not None and self[name] is not False:
                raise UsageError(f"{name}: {reason}")
        if self.kwargs.get("use_cache") is False:
            raise UsageError("use_cache=False: a state is the cache of its model; leave it out")

    def arguments(self, **forced: Any) -> dict[str, Any]:
        """The call's arguments with some of them forced, in its config where it has one."""
        arguments = {name: value for name, value in self.kwargs.items() if name != "attention_mask"}
        config = arguments.get("generation_config")
        if config is None:
            return {**arguments, **forced}
        arguments["generation_config"] = config = copy.deepcopy(config)
        for name, value in forced.items():
            setattr(config, name, value)
            arguments.pop(name, None)
        return arguments


class Continuation:
    """The forward passes of one call: the prompt is read once, then every row of every copy takes steps."""

    def __init__(self, model: PreTrainedModel, rnn: Reader, state: MultiState, copies: int, keeps_state: bool) -> None:
        self.model, self.rnn, self.state, self.copies, self.keeps_state = model, rnn, state, copies, keeps_state
        self.cache = OwnedCache(layers=[])
        self.working: MultiState | None = None  # the state that generates, once the prompt is read

    def __call__(self, ids: Tensor, kwargs: dict[str, Any]) -> Any:
        """One forward pass of `generate` over tokens [B · copies, T]."""
        other = [name for name, value in kwargs.items() if isinstance(value, Tensor) and name not in _OWN_INPUTS]
        if other:
            raise UsageError(f"{', '.join(other)}: a state reads token ids alone, no images or other inputs")
        if self.working is None:
            return self._prompt(ids, kwargs)
        return self._step(ids, kwargs) if ids.shape[1] == 1 else self._read(ids, None)

    def _prompt(self, ids: Tensor, kwargs: dict[str, Any]) -> Any:
        mask = kwargs.get("attention_mask")
        ids, mask = ids[:: self.copies], mask if mask is None else mask[:: self.copies, : ids.shape[1]]
        # A state that the caller keeps stays before the last token until the call has come to its end.
        stepping = self.keeps_state or kwargs.get("output_hidden_states")
        before = ids.shape[1] - 1 if stepping else ids.shape[1]
        logits = None
        if before:
            part = None if mask is None else mask[:, :before]
            logits = self.rnn.read(ids[:, :before], self.state, part, last_only=True)
        rows = each(self.state.batch_size, self.copies)
        same = self.copies == 1 and not self.keeps_state
        self.working = self.state if same else self.rnn.select(self.state, rows)
        self.cache.layers = self.rnn.plan.cache(self.working, columns=before).layers
        if stepping:
            return self._step(ids[:, -1:].repeat_interleave(self.copies, 0), kwargs)
        assert logits is not None
        return self._output(logits.repeat_interleave(self.copies, 0))

    def _step(self, ids: Tensor, kwargs: dict[str, Any]) -> Any:
        assert self.working is not None
        if not kwargs.get("output_hidden_states"):
            return self._read(ids, self.rnn.step)
        kwargs = {**kwargs, "attention_mask": None, "position_ids": self.working.seen[:, None]}
        with self.working.changing():
            return self.model(ids, **kwargs)

    def _read(self, ids: Tensor, step: Callable[[Tensor, MultiState], Tensor] | None) -> Any:
        assert self.working is not None
        logits = step(ids, self.working) if step else self.rnn.read(ids, self.working, last_only=True)
        for layer in self.cache.layers:
            if isinstance(layer, OwnedLayer):
                layer.columns += ids.shape[1]
        return self._output(logits)

    def _output(self, logits: Any) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(logits=logits, past_key_values=self.cache)


def twin(model: PreTrainedModel, continuation: Continuation) -> Any:
    """The same model, weights shared, that reads by `continuation`; the model that was given is untouched."""

    @wraps(model.forward)
    def forward(input_ids: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if input_ids is None or args or kwargs.get("past_key_values") is not continuation.cache:
            return model(input_ids, *args, **kwargs)
        return continuation(input_ids, kwargs)

    other: Any = copy.copy(model)
    other.forward = forward
    for hooks in ("_forward_hooks", "_forward_pre_hooks"):  # they run when the model itself is called
        setattr(other, hooks, OrderedDict())
    return other


class RowEnds(StoppingCriteria):
    """The caller's own criteria, and after how many columns each row first ended by these, a stop string or an eos."""

    def __init__(self, settings: Settings) -> None:
        given = StoppingCriteriaList(settings["stopping_criteria"] or [])
        defaults = (*_WHOLE_BATCH, EosTokenCriteria, StopStringCriteria)
        self.own = StoppingCriteriaList([criterion for criterion in given if not isinstance(criterion, defaults)])
        # Those that transformers knows go to it as they are: they replace its own of the same kind.
        self.beside = [criterion for criterion in given if isinstance(criterion, defaults)]
        self.watched: list[Any] = [criterion for criterion in self.beside if not isinstance(criterion, _WHOLE_BATCH)]
        eos, strings, tokenizer = settings["eos_token_id"], settings["stop_strings"], settings["tokenizer"]
        if eos is not None:
            self.watched.append(EosTokenCriteria(eos))
        if strings and tokenizer is not None:
            self.watched.append(StopStringCriteria(tokenizer, strings))
        self.columns: Tensor | None = None

    @property
    def criteria(self) -> StoppingCriteriaList:
        return StoppingCriteriaList([*self.beside, self])

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        stop: Tensor = self.own(input_ids, scores, **kwargs)
        ended = stop.clone()
        for criterion in self.watched:
            ended |= criterion(input_ids, scores, **kwargs)
        if self.columns is None:
            self.columns = torch.full_like(ended, torch.iinfo(torch.int64).max, dtype=torch.int64)
        self.columns = torch.where(ended, self.columns.clamp(max=input_ids.shape[1]), self.columns)
        return stop


def generated_columns(out: Any, prompt: int, ends: RowEnds | None) -> Tensor:
    """[B, N], 1 for a generated token, 0 for what fills up a row that ended before the others.

    out: generate's result with all its fields; beams carry their own lengths, else `ends` knows them.
    """
    generated: Tensor = out.sequences[:, prompt:]
    columns = torch.arange(generated.shape[1], device=generated.device)
    if getattr(out, "beam_indices", None) is not None:
        lengths: Tensor = (out.beam_indices >= 0).sum(-1)
    elif ends is not None and ends.columns is not None:
        lengths = ends.columns.to(generated.device) - prompt
    else:
        return torch.ones_like(generated)
    return (columns < lengths[:, None]).long()
