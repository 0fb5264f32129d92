from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from msrnn.checks import check_choice
from msrnn.cli.files import as_utf8, check_target, read_text, same_file, save_state
from msrnn.cli.model_options import GivenOptions, check_chat_template, load_or_empty
from msrnn.cli.options import Force, MaxNewTokens, SamplingOptions, SavedState, SaveTo
from msrnn.cli.past_training import rnn_for
from msrnn.cli.terminal import Stopped, note, note_dropped, speed_of, summary
from msrnn.core.torchrun import is_torchrun
from msrnn.errors import UsageError


def generate(
    prompt: Annotated[str, Argument(help="The text to continue; - reads standard input.")],
    *,
    state: SavedState = None,
    save: SaveTo = None,
    force: Force = False,
    chat: Annotated[
        bool, Option("--chat/--no-chat", help="Send the prompt as a message, in the model's chat template.")
    ] = False,
    protect: Annotated[
        str, Option(help="Tokens that are never evicted: none, or prompt. A saved state keeps them.")
    ] = "none",
    max_new_tokens: MaxNewTokens = 128,
    sampling: SamplingOptions,
    given: GivenOptions,
) -> None:
    """Continue a prompt, and print the text while it is generated.

    With --state, only the prompt is read: the model continues from the saved state, and options that are not given are
    those of the saved state. Ctrl-C stops; with --save the state after the text so far is written.

    With --positions auto, a text that may pass the training length is read with a horizon and compressed positions; a
    saved state that has not passed it is converted. Any other --positions stays as it is.

    With --recall, the last 64 tokens of the prompt and the answer also attend to evicted tokens: those that they ask
    for come back from an archive. A saved state with an archive keeps its --recall; another number is refused.

    Examples:
        msrnn generate "Once upon a time" --max-new-tokens 64
        msrnn generate "Name three rivers." --chat --temperature 0.7 --seed 1
        echo "The moral of the story is" | msrnn generate - --state book.safetensors
        msrnn generate "Who finds the letter?" --chat --state book.state --recall 256
    """
    settings = sampling.settings(max_new_tokens)
    check_choice("--protect", protect, ("none", "prompt"))
    options = given.complete(state)
    check_target(save, force or same_file(save, state), ["-" if prompt == "-" else None, given.model])
    text = read_text("-").removesuffix("\n") if prompt == "-" else as_utf8(prompt)
    if not text.strip():
        raise UsageError(f"PROMPT {prompt!r}: empty; give a text to continue")

    rnn, tokenizer = options.load()
    import torch

    from msrnn.cli.answer_streamer import AnswerStreamer
    from msrnn.cli.conversation import recover_state
    from msrnn.hf.chat_template import encode, encode_first, encode_following, first_messages

    current = load_or_empty(rnn, state)
    if chat:
        check_chat_template(tokenizer, "leave --chat out")
        tokens = encode_following(tokenizer, text) if state else encode_first(tokenizer, first_messages(text))
        ids = torch.tensor([tokens])
    else:
        ids = encode(tokenizer, text, add_special_tokens=not state)
    extended = rnn_for(rnn, options, given.auto, int(current.seen[0]), ids.shape[1] + max_new_tokens)
    if extended is not rnn:
        rnn, current = extended, extended.convert_state(current) if state else extended.state()
    answer = AnswerStreamer(tokenizer)
    before = current.fork(1) if save else None  # an interruption inside a forward pass makes a state unusable
    try:
        rnn.generate(ids, state=current, streamer=answer, protect=protect, **settings)
    except KeyboardInterrupt:
        answer.end()
        stopped = f"stopped after {speed_of(answer)}"
        if is_torchrun():  # the processes have stopped at different tokens
            raise Stopped(f"{stopped}; the state is not saved") from None
        if not save:
            raise Stopped(f"{stopped}; the state is not saved, --save FILE saves it") from None
        if not answer.ids or before is None:
            raise Stopped("stopped before the prompt was read; nothing is saved") from None
        current = recover_state(rnn, current, before, ids, answer.ids, protect == "prompt")
        save_state(current, save)
        raise Stopped(f"{stopped}; {save}: {summary(current)}") from None
    cut = f"; cut at --max-new-tokens {max_new_tokens}" if answer.is_cut(max_new_tokens, rnn.model) else ""
    note(f"{speed_of(answer)}{cut}")
    note_dropped(current)
    if save:
        save_state(current, save)
