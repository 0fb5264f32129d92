"""Chat in a state of fixed size: each turn reads the new message only, and the bytes never grow.

msrnn download                                    # the small default model, once; not needed with --model
python examples/endless_chat.py [--model NAME]    # a message per line; an empty line ends the chat
"""

from __future__ import annotations

import argparse

import msrnn
from msrnn.hf.chat_template import Conversation
from msrnn.hf.extension import extension, training_length
from msrnn.hf.loading import load

POLICY, SIZE = "tova", 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a name on the hub, a folder or a .gguf file")
    model, tokenizer = load(parser.parse_args().model)
    rnn = msrnn.MultiStateRNN(model, POLICY, SIZE)

    def extend(length: int) -> msrnn.MultiStateRNN:
        policy, positions = extension(POLICY, SIZE, length)  # before the training length is passed
        return msrnn.MultiStateRNN(model, policy, SIZE, positions=positions)

    settings = {"max_new_tokens": 64, "do_sample": False}
    past_training = extend if training_length(model) else None
    chat = Conversation(rnn, tokenizer, rnn.state(), settings, "Answer in one sentence.", past_training)
    while message := input("you: "):
        chat.turn(message)  # prints the answer
        print(f"[{int(chat.state.seen[0]):,} tokens read, {chat.state.nbytes:,} bytes held]")


if __name__ == "__main__":
    main()
