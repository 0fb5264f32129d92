"""Verbs past a model's training length: with --positions auto they follow the rule of `msrnn.hf.extension`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msrnn.cli.terminal import note
from msrnn.errors import UsageError
from msrnn.hf.model_options import ORIGINAL

if TYPE_CHECKING:
    from msrnn.hf.model_options import ModelOptions
    from msrnn.hf.rnn import MultiStateRNN


def extend_rnn(
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
        found = options.extend(rnn, length)
        other = found.rnn(rnn.model)
    except UsageError as reason:
        tell(f"{past}, answers may get worse ({reason})")
        return rnn
    tell(f"{past}, its state continues with {found.flags}")
    return other


def rnn_for(
    rnn: MultiStateRNN, options: ModelOptions, auto: bool, seen: int, new: int, tell: Callable[[str], object] = note
) -> MultiStateRNN:
    """The model to read at most `new` tokens with, from a state that has read `seen`.

    Within the training length, and with positions that are not original, it is `rnn`. Farther, `extend_rnn` decides
    if positions are `auto`; original positions that were asked for stay, with a warning before the work.
    """
    from msrnn.hf.extension import training_length

    length = training_length(rnn.model)
    if length is None or seen + new <= length or options.positions != ORIGINAL:
        return rnn
    if auto:
        return extend_rnn(rnn, options, length, seen, tell)
    tell(
        f"--positions original: the text may reach token {seen + new:,}, past the {length:,} that this model was "
        f"trained on, and answers may get worse{_advice(rnn, options, length)}"
    )
    return rnn


def _advice(rnn: MultiStateRNN, options: ModelOptions, length: int) -> str:
    """How to read a text that passes the training length, or why that cannot be."""
    try:
        return f"; read the text from its beginning with {options.extend(rnn, length).flags}"
    except UsageError as reason:
        return f" ({reason})"
