"""Make the engine of a server. With positions `auto` it has a second lane for requests past the training length."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from msrnn.core.notes import note
from msrnn.engine.engine import Engine
from msrnn.engine.lanes import LongEngine
from msrnn.errors import UsageError
from msrnn.hf.extension import training_length

if TYPE_CHECKING:
    from msrnn.hf.model_options import ModelOptions
    from msrnn.hf.rnn import MultiStateRNN


def make_engine(
    rnn: MultiStateRNN, slots: int | None, auto: ModelOptions | None = None, shared: bool = False, **settings: Any
) -> Engine:
    """Make an engine with this many batch slots; `settings` are further arguments of `Engine`.

    auto    the options of the model, where positions are `auto`: requests that may pass the training length then have
            compressed positions and a horizon. Where that cannot be, positions are original, and a note says why
    shared  whether other processes of the job have parts of the model
    """
    longer = _find_longer(rnn, auto, shared) if auto is not None and auto.policy.evicts else None
    if longer is not None:
        return LongEngine(rnn, longer.rnn, longer.length, slots, on_long=partial(_note_long, longer), **settings)
    if not shared:
        return Engine(rnn, slots, **settings)
    from msrnn.engine.tensor_parallel_executor import TensorParallelExecutor

    return Engine(TensorParallelExecutor(rnn, slots), **settings)


class _Longer(NamedTuple):
    """The RNN of requests that may pass the training length."""

    rnn: MultiStateRNN
    options: ModelOptions
    length: int


def _find_longer(rnn: MultiStateRNN, options: ModelOptions, shared: bool) -> _Longer | None:
    length = training_length(rnn.model)
    if length is None:
        note("positions=auto: the config of this model gives no training length, so positions are original")
        return None
    try:
        found = options.extend(rnn, length)
        if shared:
            raise UsageError(f"processes that share a model have one kind of positions; start it with {found.summary}")
        return _Longer(found.rnn(rnn.model), found, length)
    except UsageError as reason:
        learned = rnn.spec.model.last_position is not None
        then = "requests are refused" if learned else "positions are original, and answers may get worse"
        note(f"positions=auto: past the {length:,} tokens that this model was trained on, {then} ({reason})")
        return None


def _note_long(longer: _Longer) -> None:
    with suppress(OSError, ValueError):  # a closed standard error must not end the engine's thread
        note(
            f"a request may pass the {longer.length:,} tokens that this model was trained on: such requests are "
            f"answered with {longer.options.summary}"
        )
