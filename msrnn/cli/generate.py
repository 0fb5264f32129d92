from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from msrnn.cli.options import (
    Device,
    Force,
    MaxNewTokens,
    Model,
    Sample,
    SavedDtype,
    SavedPolicy,
    SavedPositions,
    SavedSize,
    SavedStateDtype,
    SaveTo,
    Seed,
    Speech,
    Temperature,
    TopP,
    state_of,
)
from msrnn.cli.saved import choose
from msrnn.cli.saving import check_target, keep, same_file
from msrnn.cli.terminal import Stopped, note, summary
from msrnn.cli.text import as_utf8, encode, read_text
from msrnn.errors import UsageError
from msrnn.hf import chat_template as turns

if TYPE_CHECKING:
    from torch import Tensor

    from msrnn.cli.voice import Voice
    from msrnn.core.state import MultiState
    from msrnn.hf.rnn import MultiStateRNN


def generate(
    prompt: Annotated[str, Argument(help="The text to go on from; - is standard input.")],
    state: Annotated[Path | None, Option(help="Go on from this saved state.", show_default=False)] = None,
    save: SaveTo = None,
    force: Force = False,
    chat: Annotated[bool, Option("--chat/--no-chat", help="Ask by the model's chat template.")] = False,
    max_new_tokens: MaxNewTokens = 128,
    sample: Sample = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    model: Model = None,
    policy: SavedPolicy = None,
    size: SavedSize = None,
    device: Device = "auto",
    dtype: SavedDtype = None,
    state_dtype: SavedStateDtype = None,
    positions: SavedPositions = None,
    seed: Seed = None,
) -> None:
    """Go on from a prompt, streaming; from a saved state, the prompt is all that is read.

    With --state, options that are not given are those of the saved state. Ctrl-C stops, and --save keeps what was said.

    Examples:
        msrnn generate "Once upon a time" --max-new-tokens 64
        msrnn generate "Name three rivers." --chat --temperature 0.7 --seed 1
        echo "The moral of the story is" | msrnn generate - --state book.safetensors
    """
    speech = Speech(max_new_tokens, sample, temperature, top_p)
    choice = choose(state, model, policy, size, device, dtype, seed, state_dtype, positions)
    check_target(save, force or same_file(save, state), ["-" if prompt == "-" else None, model])
    text = read_text("-").removesuffix("\n") if prompt == "-" else as_utf8(prompt)
    if not text.strip():
        raise UsageError(f"PROMPT {prompt!r}: empty; give a text to go on from")

    rnn, tokenizer = choice.load()
    from msrnn.cli.beyond import warn_beyond
    from msrnn.cli.voice import Voice

    told = state_of(rnn, state)
    if chat:
        turns.check_template(tokenizer)
        text = turns.following(tokenizer, text) if state else turns.opening(tokenizer, text)
    ids = encode(tokenizer, text, opening=not state and not chat)
    read = int(told.seen[0]) + ids.shape[1]
    warn_beyond(rnn, choice, read)
    voice = Voice(tokenizer)
    try:
        rnn.generate(ids, state=told, streamer=voice, **speech.settings)
    except KeyboardInterrupt:
        voice.end()
        raise Stopped(_stopped(rnn, told, ids, read, voice, save)) from None
    note("; ".join(filter(None, (voice.speed, voice.cut_at(max_new_tokens, rnn.model)))))
    if save:
        keep(told, save)


def _stopped(rnn: MultiStateRNN, state: MultiState, ids: Tensor, read: int, voice: Voice, save: Path | None) -> str:
    """What was kept of an answer that Ctrl-C ended. The state is before the prompt's last token then, or inside the
    prompt, where there is nothing to keep."""
    stopped = f"stopped after {voice.speed}"
    if not save:
        return f"{stopped}; the state is not kept, --save FILE keeps it"
    if not voice.ids or int(state.seen[0]) != read - 1:
        return "stopped before the prompt was read; nothing is saved"
    import torch

    rnn.read(torch.tensor([[int(ids[0, -1]), *voice.ids]]), state, last_only=True)
    keep(state, save)
    return f"{stopped}; {save}: {summary(state)}"
