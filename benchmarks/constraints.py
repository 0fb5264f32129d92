"""What do constraints cost: tokens per second with a share of the requests constrained, relative to none of them?

    python -m benchmarks.constraints --random-weights llama-2-7b --slots 448 --answer 1024
    python -m benchmarks.constraints --random-weights tiny --slots 4 --answer 64 --prompt 16 --seconds 3 --rounds 2

All batch slots stay in use. Rounds without and with constrained requests alternate in one engine, and each begins with
new requests. A constrained answer is JSON of a schema; it is long, so that it ends by `max_tokens` as the others do.
Random weights have a tokenizer that is trained on Python's standard library.
"""

from __future__ import annotations

import argparse
import json
import string
import sysconfig
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import msrnn
from benchmarks.serving import Client
from msrnn.evaluation.benchmark.random_weights import random_model
from msrnn.evaluation.environment import environment
from msrnn.hf.loading import load

FILES = 600  # of the standard library
BYTES = 256 + 3  # tokens that a tokenizer of all bytes has, at least
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["book", "record", "film"]},
        "price": {"type": "integer", "minimum": 0, "maximum": 9999},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 4},
    },
    "required": ["name", "kind", "price", "tags"],
    "additionalProperties": False,
}
LEAST_ITEMS = 400  # more than fit an answer
SCHEMA = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": ITEM, "minItems": LEAST_ITEMS}},
    "required": ["items"],
    "additionalProperties": False,
}


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with at most this many tokens; with few, it has printable characters only."""
    paths = islice(sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")), FILES)
    texts = [path.read_text(errors="ignore") for path in paths]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocabulary < BYTES:
        alphabet, texts = sorted({*string.printable[:94], "Ġ"} - {"~", "`"}), []
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>"]  # with the ids that the shapes' configs have
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, special_tokens=special)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


class MixedClient(Client):
    """A client whose answers are sampled, and constrained in a share of its requests."""

    def __init__(self, engine: msrnn.Engine, prompt: int, answer: int, share: float) -> None:
        super().__init__(engine, prompt, answer)
        self.share, self.asked, self.constrained = share, 0, 0
        self.constraint = msrnn.Constraint.json(SCHEMA)

    def add(self, prompt: int | None = None, answer: int | None = None) -> None:
        self.asked += 1
        constrains = int(self.asked * self.share) > self.constrained
        self.constrained += constrains
        how: Any = {"constraint": self.constraint} if constrains else {"ignore_eos": True}
        params = msrnn.SamplingParams(temperature=1, seed=self.asked, max_tokens=answer or self.answer, **how)
        self.submit(prompt or self.prompt, params)

    def leave(self) -> None:
        """Cancel everything that is under way."""
        for request in [*self.arrived]:
            request.cancel()
        while not self.engine.idle:
            self.step()


def run_round(engine: msrnn.Engine, args: argparse.Namespace, share: float, seconds: float) -> dict[str, float]:
    client = MixedClient(engine, args.prompt, args.answer, share)
    client.fill()
    found = client.run(seconds, client.saturated)
    held = sum(request.params.constraint is not None for request in client.arrived) / max(1, len(client.arrived))
    client.leave()
    return {**found, "constrained": held}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random-weights", help="a shape such as llama-2-7b, instead of the small default model")
    parser.add_argument("--policy", default="tova")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--slots", type=int, default=8, help="answers at once")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--answer", type=int, default=1024)
    parser.add_argument("--share", type=float, default=0.25, help="of the requests, constrained")
    parser.add_argument("--seconds", type=float, default=20, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.random_weights:
        model: Any = random_model(args.random_weights)
        tokenizer: Any = make_tokenizer(model.config.vocab_size)
    else:
        model, tokenizer = load()
    rnn = msrnn.MultiStateRNN(model, args.policy, args.size)
    engine = msrnn.Engine(rnn, args.slots, tokenizer=tokenizer, prefix_bytes=0, prefix_host_bytes=0)
    engine.warm_up()
    about = {name: getattr(args, name) for name in ("policy", "size", "slots", "prompt", "answer")}
    about |= {"vocabulary": len(tokenizer), **environment(model.device)}
    rates: dict[float, list[float]] = {0.0: [], args.share: []}
    run_round(engine, args, args.share, args.seconds / 4)  # what is compiled and allocated once is not measured
    for _ in range(args.rounds):
        for share, found in rates.items():
            measured = run_round(engine, args, share, args.seconds)
            found.append(measured["tokens_per_second"])
            print(json.dumps({"case": f"{share:g} constrained", **measured, **about}), flush=True)
    none, some = (median(found) for found in rates.values())
    ratios = [after / before for before, after in zip(*rates.values(), strict=True)]
    row = {"case": "ratio of the medians", "ratio": some / none, "ratios": [round(one, 3) for one in ratios]}
    print(json.dumps({**row, **about}), flush=True)


if __name__ == "__main__":
    main()
