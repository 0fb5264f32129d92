"""Chat in a state of fixed size: each turn reads the new message only, and the bytes never grow.

    msrnn download                                    # the small default model, once; not needed with --model
    python examples/endless_chat.py [--model NAME]    # a message per line; an empty line ends the chat

`msrnn chat` does the same, streams its answers and saves the conversation.
"""

from __future__ import annotations

import argparse

import torch

import msrnn
from msrnn.hf import chat_template
from msrnn.hf.loading import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a name on the hub, a folder or a .gguf file")
    model, tokenizer = load(parser.parse_args().model)
    # First token, horizon and positions: what a conversation needs that may pass the model's training length.
    rnn = msrnn.MultiStateRNN(model, policy="tova+1~1024", size=256, positions="compressed")
    closing = tokenizer(chat_template.closing(tokenizer), add_special_tokens=False).input_ids  # after every answer
    state = rnn.state()
    while message := input("you: "):
        if state.seen.any():
            turn = chat_template.encode_following(tokenizer, message)
        else:
            turn = chat_template.encode_first(tokenizer, chat_template.first_messages(message))
        answer = rnn.generate(torch.tensor([turn]), state=state, max_new_tokens=64)[0, len(turn) :]
        rest = closing[1:] if answer[-1] == closing[0] else closing  # an answer that was cut has no stop token
        rnn.read(torch.tensor([rest]), state, last_only=True)
        print(tokenizer.decode(answer, skip_special_tokens=True))
        print(f"[{int(state.seen[0]):,} tokens read, {state.nbytes:,} bytes held]")


if __name__ == "__main__":
    main()
