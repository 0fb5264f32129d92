"""Past the length that a model was made for: from there on, what a conversation keeps stands closer together, and what
is farther back than that length is not kept, since old tokens gather where nothing ends them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from msrnn.cli.options import ORIGINAL, Choice
from msrnn.cli.terminal import note
from msrnn.core.rope import COMPRESSED
from msrnn.hf.rnn import MultiStateRNN
from msrnn.policy import FULL, Policy


def training_length(rnn: MultiStateRNN) -> int | None:
    """The longest text that the model was trained on; None where its config does not say."""
    config: Any = rnn.model.config.get_text_config(decoder=True)
    length = getattr(config, "max_position_embeddings", None)
    return length if isinstance(length, int) else None


def warn_beyond(rnn: MultiStateRNN, choice: Choice, tokens: int) -> None:
    """Say once, before the work, that a text of `tokens` ends at positions that the model never saw in training."""
    length = training_length(rnn)
    if length is None or tokens <= length or choice.positions != ORIGINAL:
        return
    bounded = " and a bounded --policy" if choice.policy == FULL else ""
    note(
        f"--positions original: the text reaches token {tokens:,}, past the {length:,} that this model was trained on, "
        f"and answers may get worse; read it from its beginning with --positions compressed{bounded}"
    )


class Beyond:
    """Who goes on where a conversation passes the model's length. It does so once, and says so."""

    def __init__(self, choice: Choice) -> None:
        self.choice = replace(choice, positions=COMPRESSED)
        self.passed = False

    def successor(self, rnn: MultiStateRNN, tokens: int) -> MultiStateRNN:
        """For a turn that may end after so many tokens; the same one while there is room, or where nothing helps."""
        length = training_length(rnn)
        if self.passed or length is None or tokens <= length:
            return rnn
        self.passed = True
        what = f"past the {length:,} tokens that this model was made for"
        try:
            successor = replace(self.choice, policy=reaching(self.choice, length)).bounded(rnn.model)
        except ValueError as reason:
            note(f"{what}, answers may get worse ({reason})")
            return rnn
        note(f"{what}, positions are compressed, and what is farther back is forgotten")
        return successor


def reaching(choice: Choice, length: int) -> str:
    """The policy with a horizon of so many tokens and its first token protected, unless it has a horizon already."""
    if choice.policy == FULL or Policy.parse(choice.policy).horizon is not None:
        return choice.policy
    chosen = Policy.parse(choice.policy)
    return replace(chosen, first=max(1, chosen.first), horizon=max(length, 2 * choice.size)).name
