from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from msrnn import turns
from msrnn.cli.options import (
    ORIGINAL,
    Choice,
    Device,
    Dtype,
    Force,
    MaxNewTokens,
    Model,
    PolicyName,
    Positions,
    Sample,
    SaveTo,
    Seed,
    Size,
    Speech,
    StateDtype,
    Temperature,
    TopP,
    state_of,
)
from msrnn.cli.text import as_utf8, check_target, encode, read_text


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
    policy: PolicyName = "tova",
    size: Size = 512,
    device: Device = "auto",
    dtype: Dtype = None,
    state_dtype: StateDtype = None,
    positions: Positions = ORIGINAL,
    seed: Seed = None,
) -> None:
    """Go on from a prompt, streaming; from a saved state, the prompt is all that is read.

    Examples:
        msrnn generate "Once upon a time" --max-new-tokens 64
        msrnn generate "Name three rivers." --chat --temperature 0.7 --seed 1
        echo "The moral of the story is" | msrnn generate - --state book.safetensors
    """
    choice = Choice(model, policy, size, device, dtype, seed, state_dtype, positions)
    speech = Speech(max_new_tokens, sample, temperature, top_p)
    check_target(save, force or save == state)
    text = read_text("-").removesuffix("\n") if prompt == "-" else as_utf8(prompt)
    if not text.strip():
        raise ValueError(f"PROMPT {prompt!r}: empty; give a text to go on from")
    choice.check_state(state)

    rnn, tokenizer = choice.load()
    from msrnn.cli.voice import Voice

    told = state_of(rnn, state)
    if chat:
        turns.check_template(tokenizer)
        text = turns.following(tokenizer, text) if state else turns.opening(tokenizer, text)
    ids = encode(tokenizer, text, opening=not state and not chat)
    rnn.generate(ids, state=told, streamer=Voice(tokenizer), **speech.settings)
    if save:
        told.save(save)
