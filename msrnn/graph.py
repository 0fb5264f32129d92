"""One decode step as one CUDA graph: a bounded state has one shape, so what was captured once replays for ever."""

from __future__ import annotations

import copy
import warnings
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from msrnn.plan import Plan
from msrnn.state import MultiState


class StepGraph:
    """The step of one state. It lives on the state's own buffers, which never move."""

    def __init__(self, model: PreTrainedModel, plan: Plan, state: MultiState) -> None:
        B, device = state.batch_size, model.device
        self.ids = torch.zeros(B, 1, dtype=torch.long, device=device)
        # In four dimensions, a mask reaches attention as it is. What it hides is padding, so that warming up with
        # nothing but padding leaves the state untouched.
        self.real = torch.zeros(B, 1, 1, 1, dtype=torch.bool, device=device)
        self.graph = torch.cuda.CUDAGraph()

        def step() -> Tensor:
            logits: Tensor = model(
                input_ids=self.ids,
                attention_mask=self.real,
                position_ids=state.seen[:, None],
                past_key_values=plan.cache(state),
                use_cache=True,
            ).logits
            return logits

        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream(device).wait_stream(side)
        with torch.cuda.graph(self.graph):
            self.logits = step()
        self.real.fill_(True)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """[B, 1] -> [B, 1, V], overwritten by the next call."""
        self.ids.copy_(input_ids)
        self.graph.replay()
        return self.logits


def capture(model: PreTrainedModel, plan: Plan, state: MultiState) -> StepGraph | None:
    """The graph of a state's step; None where there is none to be had, which is said if it should have been."""
    fixed = all(bound is not None and shape is not None for bound, shape in zip(plan.bounds, plan.shapes, strict=True))
    one_device = len({shape.device for shape in plan.shapes if shape}) == 1
    if not (fixed and one_device and set(plan.backends) == {"triton"} and model.device.type == "cuda"):
        return None
    columns = [layer.columns for layer in state.layers]
    try:
        return StepGraph(model, plan, state)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        warnings.warn(f"the step cannot be captured, so every token launches its kernels ({reason})", stacklevel=3)
        return None
    finally:
        for layer, count in zip(state.layers, columns, strict=True):
            layer.columns = count  # what was warmed up was not read


def replaying(model: PreTrainedModel, graph: StepGraph) -> PreTrainedModel:
    """The same model, weights shared, whose single tokens replay a graph; the model that was given is untouched."""
    original = type(model).forward

    @wraps(original)
    def forward(self: Any, input_ids: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if input_ids is None or input_ids.shape != graph.ids.shape or kwargs.get("output_hidden_states"):
            return original(self, input_ids, *args, **kwargs)
        logits: Any = graph(input_ids)
        return CausalLMOutputWithPast(logits=logits, past_key_values=kwargs.get("past_key_values"))

    twin = copy.copy(model)
    twin.__class__ = type(type(model).__name__, (type(model),), {"forward": forward})
    return twin
