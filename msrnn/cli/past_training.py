"""What verbs do past a model's training length: with --positions auto they follow the rule of `msrnn.hf.extension`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from msrnn.cli.options import ORIGINAL
from msrnn.cli.terminal import note
from msrnn.errors import UsageError
from msrnn.size import joint_name

if TYPE_CHECKING:
    from msrnn.cli.model_options import ModelOptions
    from msrnn.engine.engine import Engine
    from msrnn.hf.rnn import MultiStateRNN


def extended_options(rnn: MultiStateRNN, options: ModelOptions, length: int) -> ModelOptions:
    """The options of a state that reads past the training length. Raises a UsageError where the rule cannot hold."""
    from msrnn.hf.extension import COMPRESSED, extended_policy, largest_size

    policy = extended_policy(options.policy, largest_size(rnn.spec), length)
    return replace(options, policy=policy, positions=COMPRESSED)


def as_words(options: ModelOptions) -> str:
    """The options of a state, as the command line takes them."""
    policy = joint_name(options.policy, options.size.budget if options.size else None)
    return f"--policy {policy} --positions {options.positions}"


def extended_rnn(
    rnn: MultiStateRNN, options: ModelOptions, length: int, seen: int, tell: Callable[[str], object] = note
) -> MultiStateRNN:
    """The model to continue with past its training length, from a state that has read `seen` tokens, with a remark.

    It is `rnn` itself where the rule cannot hold, and for a state that has passed the length with original positions:
    converting that one would evict what its owner chose to keep.
    """
    if seen > length:
        tell(
            f"the state has read {seen:,} tokens with --positions original, past the {length:,} that this model was "
            f"trained on: it stays as it is, and answers may get worse{_advice(rnn, options, length)}"
        )
        return rnn
    past = f"past the {length:,} tokens that this model was trained on"
    try:
        found = extended_options(rnn, options, length)
        other = found.rnn(rnn.model)
    except UsageError as reason:
        tell(f"{past}, answers may get worse ({reason})")
        return rnn
    tell(f"{past}, its state continues with {as_words(found)}")
    return other


def rnn_for(
    rnn: MultiStateRNN, options: ModelOptions, auto: bool, seen: int, new: int, tell: Callable[[str], object] = note
) -> MultiStateRNN:
    """The model to read at most `new` tokens with, from a state that has read `seen`.

    Within the training length, and with positions that are not original, it is `rnn`. Farther, `extended_rnn` decides
    if positions are `auto`; original positions that were asked for stay, with a warning before the work.
    """
    from msrnn.hf.extension import training_length

    length = training_length(rnn.model)
    if length is None or seen + new <= length or options.positions != ORIGINAL:
        return rnn
    if auto:
        return extended_rnn(rnn, options, length, seen, tell)
    tell(
        f"--positions original: the text may reach token {seen + new:,}, past the {length:,} that this model was "
        f"trained on, and answers may get worse{_advice(rnn, options, length)}"
    )
    return rnn


def _advice(rnn: MultiStateRNN, options: ModelOptions, length: int) -> str:
    """How to read a text that passes the training length, or why that cannot be."""
    try:
        return f"; read the text from its beginning with {as_words(extended_options(rnn, options, length))}"
    except UsageError as reason:
        return f" ({reason})"


def engine_of(rnn: MultiStateRNN, shared: bool) -> Callable[..., Engine]:
    """What makes an engine for one kind of positions; `shared`: other processes of the job have parts of the model."""
    from msrnn.engine.engine import Engine

    if not shared:
        return partial(Engine, rnn)
    from msrnn.engine.tensor_parallel_executor import TensorParallelExecutor

    return lambda slots, **options: Engine(TensorParallelExecutor(rnn, slots), **options)


def engine_maker(rnn: MultiStateRNN, options: ModelOptions, shared: bool) -> Callable[..., Engine]:
    """What makes a server's engine: requests that may pass the training length follow the rule.

    Where that cannot be, positions are original alone, and a note says why.
    """
    from msrnn.engine.lanes import LongEngine
    from msrnn.hf.extension import training_length

    plain, length = engine_of(rnn, shared), training_length(rnn.model)
    if not options.policy.evicts:
        return plain  # which refuses it
    if length is None:
        note("--positions auto: the config of this model states no training length, so positions are original")
        return plain
    try:
        found = extended_options(rnn, options, length)
        if shared:
            raise UsageError(
                f"processes that share a model have one kind of positions; start it with {as_words(found)}"
            )
        return partial(LongEngine, rnn, found.rnn(rnn.model), length, on_long=partial(_tell, length, found))
    except UsageError as reason:
        learned = rnn.spec.model.last_position is not None
        then = "requests are refused" if learned else "positions are original, and answers may get worse"
        note(f"--positions auto: past the {length:,} tokens that this model was trained on, {then} ({reason})")
        return plain


def _tell(length: int, options: ModelOptions) -> None:
    with suppress(OSError, ValueError):  # a closed standard error must not end the engine's thread
        note(
            f"a request may pass the {length:,} tokens that this model was trained on: such requests are answered with "
            f"{as_words(options)}"
        )
