"""Read a long text once, save the state, and continue from it later, as often as you like.

    python examples/read_once.py read book.txt book.safetensors [--model NAME]
    python examples/read_once.py continue book.safetensors "The next morning"

A bounded state continues a text and knows its end. Ask it for no detail that is far back: most are evicted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import msrnn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("verb", choices=["read", "continue"])
    parser.add_argument("source", help="a text to read, or a saved state")
    parser.add_argument("target", help="the file to save the state in, or the words to continue with")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a name on the hub, or a folder")
    given = parser.parse_args()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(given.model), AutoTokenizer.from_pretrained(given.model)
    # First token, horizon and positions: what a text needs that may be longer than the model was trained for.
    rnn = msrnn.MultiStateRNN(model, policy="echo+1~2048", size=512, positions="compressed")
    if given.verb == "read":
        state = rnn.state()
        ids = tokenizer(Path(given.source).read_text(), return_tensors="pt").input_ids
        rnn.read(ids, state, last_only=True)  # constant memory, however long the text is
        state.save(given.target)
        print(f"{ids.shape[1]:,} tokens read, {state.nbytes:,} bytes saved")
    else:
        ids = tokenizer(given.target, return_tensors="pt").input_ids
        out = rnn.generate(ids, state=rnn.load_state(given.source), max_new_tokens=64)
        print(tokenizer.decode(out[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
