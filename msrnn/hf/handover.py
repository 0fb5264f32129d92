"""Set the attention of a model to "msrnn", and give the model back as it was."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel

from msrnn.hf.cache_layers import NAME


@contextmanager
def msrnn_attention(model: PreTrainedModel) -> Iterator[None]:
    """Put the model into evaluation mode with the attention of msrnn, and restore it afterwards."""
    before = Handover(model)
    try:
        yield
    finally:
        before.undo()


class Handover:
    """Put a model into evaluation mode with the attention "msrnn", and record its original settings."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        configs = {"": model.config, **{name: getattr(model.config, name, None) for name in model.config.sub_configs}}
        self._before = {name: config._attn_implementation for name, config in configs.items() if config is not None}
        self._training = [weakref.ref(module) for module in model.modules() if module.training]
        try:
            model.eval()
            model.set_attn_implementation(NAME)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Restore the model's attention implementation and training modes."""
        model = self._model()
        if model is not None:
            model.set_attn_implementation(self._before)
        for module in (reference() for reference in self._training):
            if module is not None:
                module.training = True


@dataclass(frozen=True, eq=False)
class _Wrapped:
    """A model that was handed over, and the objects that need the attention of msrnn, while they are alive.

    Numbers tell the order in which they were made, and in which their `with` blocks began.
    """

    handover: Handover  # the first one, which knows how the model was
    made: weakref.WeakKeyDictionary[object, int] = field(default_factory=weakref.WeakKeyDictionary)
    begun: weakref.WeakKeyDictionary[object, int] = field(default_factory=weakref.WeakKeyDictionary)
    numbers: Iterator[int] = field(default_factory=itertools.count)


_WRAPPED: weakref.WeakKeyDictionary[nn.Module, _Wrapped] = weakref.WeakKeyDictionary()


def hand_over(model: PreTrainedModel, holder: object) -> None:
    """Put a model into evaluation mode with the attention of msrnn, for `holder`, until it is given back."""
    handover = Handover(model)
    wrapped = _WRAPPED.setdefault(model, _Wrapped(handover))
    wrapped.made[holder] = next(wrapped.numbers)


def begin_block(model: PreTrainedModel | None, holder: object) -> None:
    """The `with` block of a holder begins."""
    wrapped = _WRAPPED.get(model) if model is not None else None
    if wrapped is not None and holder in wrapped.made:
        wrapped.begun[holder] = next(wrapped.numbers)


def end_block(model: PreTrainedModel | None, holder: object) -> None:
    """The `with` block of a holder ends: give the model back, unless an object from before the block needs it.

    What was made inside the block ends with it, whether it is alive or not, unless its own block has not ended.
    """
    wrapped = _WRAPPED.get(model) if model is not None else None
    if wrapped is None:
        return
    began = wrapped.begun.pop(holder, None)
    wrapped.made.pop(holder, None)
    if began is not None:
        for other, number in list(wrapped.made.items()):
            if number > began and other not in wrapped.begun:
                del wrapped.made[other]
    if not len(wrapped.made):
        give_back(model)


def give_back(model: PreTrainedModel | None) -> None:
    """Make a model what it was before the first `hand_over`, whoever needs it."""
    wrapped = _WRAPPED.pop(model, None) if model is not None else None
    if wrapped is not None:
        wrapped.handover.undo()
