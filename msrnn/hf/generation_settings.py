"""The settings of one call of `generate`, and what a state refuses of them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from msrnn.core.mark import check_markable
from msrnn.core.state import MultiState
from msrnn.errors import UsageError
from msrnn.hf.state_spec import StateSpec

_DRAFTS = "use prompt_lookup_num_tokens, or an assistant_model"
_UNSUPPORTED = {
    "assistant_early_exit": f"its draft would be read into the state; {_DRAFTS}",
    "use_mtp": f"its draft needs the model's hidden states; {_DRAFTS}",
    "speculation_type": f"its draft needs the model's hidden states; {_DRAFTS}",
    "position_ids": "a state counts the positions of its tokens itself; leave it out",
    "past_key_values": "the state is the cache; pass it as state=",
    "inputs_embeds": "a state reads token ids; pass input_ids",
    "cache_implementation": "the state is the cache; leave it out",
    "output_attentions": "a bounded state has no fixed columns; msrnn.trace gives eviction times",
}


class Settings:
    """The generation settings of one call: its arguments, its generation config, then the model's."""

    def __init__(self, model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
        self.model, self.kwargs = model, kwargs

    def __getitem__(self, name: str) -> Any:
        if name in self.kwargs:  # None is a value: eos_token_id=None generates past every stop token
            return self.kwargs[name]
        configs = (self.kwargs.get("generation_config"), self.model.generation_config)
        values = (getattr(config, name, None) for config in configs)
        return next((value for value in values if value is not None), None)

    @property
    def pad_token(self) -> int:
        """The token that fills up a sequence after its end, as transformers chooses it; 0 where it would write none."""
        pad, eos = self["pad_token_id"], self["eos_token_id"]
        if pad is None:
            pad = 0 if eos is None else torch.as_tensor(eos).flatten()[0]
        return int(pad)

    @property
    def drafts(self) -> bool:
        """Whether tokens are guessed, and taken back where the model would not have written them."""
        return self["assistant_model"] is not None or self["prompt_lookup_num_tokens"] is not None

    def check(self) -> None:
        """Refuse arguments that a state does not support, before a token is read."""
        for name, reason in _UNSUPPORTED.items():
            if self[name] is not None and self[name] is not False:
                raise UsageError(f"{name}: {reason}")
        if self.drafts and self["output_hidden_states"]:
            raise UsageError(
                "not with a draft", name="output_hidden_states", value=True, advice="leave one of them out"
            )
        if self.kwargs.get("use_cache") is False:
            raise UsageError("a state is the cache of its model", name="use_cache", value=False, advice="leave it out")

    @property
    def sequences(self) -> int:
        return self["num_return_sequences"] or 1

    @property
    def beams(self) -> int:
        return self["num_beams"] or 1

    def check_state(self, spec: StateSpec, state: MultiState, continues: bool) -> None:
        """Refuse what a state cannot do; `continues` where it is the caller's own."""
        if spec.recall is not None and spec.recall.every > 1:
            for name, value in (("num_beams", self.beams), ("num_return_sequences", self.sequences)):
                if value > 1:
                    raise UsageError("needs recall_every=1", name=name, value=value, advice="recall for every token")
            if self["output_hidden_states"]:
                raise UsageError("needs recall_every=1", name="output_hidden_states", value=True, advice="leave it out")
        if continues and self.sequences > 1:
            raise UsageError(
                "a state holds one continuation",
                name="num_return_sequences",
                value=self.sequences,
                advice="fork it, then generate",
            )
        if continues and state.batch_size > 1 and spec.hybrid:
            raise UsageError(
                f"a state of {state.batch_size} sequences: the linear-attention layers of this model cannot skip those "
                "that have ended; select one and generate from it alone"
            )
        if self.drafts:
            check_markable(state)

    def arguments(self, **forced: Any) -> dict[str, Any]:
        """The call's arguments with some of them forced, in its generation config if it has one."""
        arguments = {name: value for name, value in self.kwargs.items() if name != "attention_mask"}
        config = arguments.get("generation_config")
        if config is None:
            return {**arguments, **forced}
        arguments["generation_config"] = config = copy.deepcopy(config)
        for name, value in forced.items():
            setattr(config, name, value)
            arguments.pop(name, None)
        return arguments
