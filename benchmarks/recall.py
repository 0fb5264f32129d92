"""What does recall cost on this GPU: a step, a question, and reading with an archive?

    python -m benchmarks.recall [--random-weights llama-3-8b] [--archived 100000] [--recall 256] [--rounds 3]

With random weights and random tokens, all guests change at every token, and those that are fetched lie far from each
other in the archive: the most that a step can cost. Real text changes about half of them, and several lie in each page
of 64 KB, whose address a GPU translates once. So steps are also measured with queries that have a part in common, which
is added after their projection, and with keys of each 128 tokens that have a part in common (`--alike-keys`), by the
share of the guests that a token changes and by the pages for each fetched row. With 0.9 of both in common, these are as
in real text. Memory is pinned and graphs are captured before anything is measured, but for the first read of the whole
text, which is reported on its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import msrnn
from benchmarks.common import report, seconds
from msrnn.core.recall_slots import RecallSlots
from msrnn.core.state import MultiState
from msrnn.evaluation.benchmark.random_weights import random_model
from msrnn.recall import SEGMENT

TEXT, QUESTION, STEPS = 16_384, 32, 20  # tokens
WARM_UP = 4  # reads of one shape, after which its graph is captured
ALIKE = (0.0, 0.8, 0.9, 0.95, 1.0)  # shares of a query's square that all tokens have in common
SPAN = 128  # tokens whose keys have a part in common, another one than the next
PAGE = 2**16  # bytes of the host's memory whose address a GPU translates at once


def timed(work: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
    torch.cuda.synchronize()

    def until_done() -> None:
        work(*args, **kwargs)
        torch.cuda.synchronize()

    return seconds(until_done)


def step_milliseconds(
    rnn: msrnn.MultiStateRNN, state: MultiState, tokens: Iterator[Tensor], rounds: int
) -> list[float]:
    def steps() -> None:
        for _ in range(STEPS):
            rnn.step(next(tokens), state)

    steps()
    return [1000 * timed(steps) / STEPS for _ in range(rounds)]


class Alike:
    """Gives the queries or keys of all layers a part in common: those of one random row, or of one for each span.

    A hook is one kernel, so that a step hardly takes longer. Captured graphs read tensors that `set_share` changes.
    """

    def __init__(self, model: Any, projection: str, spans: int = 1) -> None:
        self._own = torch.ones((), device=model.device, dtype=model.dtype)
        self._parts: list[tuple[Tensor, Tensor]] = []  # of each layer: all that is in common, and the share of it
        self._span = torch.zeros(1, 1, dtype=torch.int64, device=model.device)  # of each token
        model.model.rotary_emb.register_forward_pre_hook(self._find_spans, with_kwargs=True)
        for layer in model.model.layers:
            module = getattr(layer.self_attn, projection)
            rows = module(torch.randn(spans, module.in_features, device=model.device, dtype=model.dtype))
            self._parts.append((rows, torch.zeros_like(rows)))
            module.register_forward_hook(partial(self._mix, self._parts[-1][1]))

    def set_share(self, share: float) -> None:
        """Let this share of the square be in common."""
        self._own.fill_((1 - share) ** 0.5)
        for rows, part in self._parts:
            torch.mul(rows, share**0.5, out=part)

    def _find_spans(self, _: Any, __: Any, inputs: dict[str, Tensor]) -> None:
        self._span = inputs["position_ids"] // SPAN

    def _mix(self, part: Tensor, _: Any, __: Any, output: Tensor) -> Tensor:
        if len(part) > 1 and output.shape[1] == 1:  # a token of a step: spans are of the text
            return output
        return torch.addcmul(part if len(part) == 1 else part[self._span % len(part)], output, self._own)


class Changes(NamedTuple):
    """What tokens change of the guests, on average."""

    guests: float  # the share that is fetched
    pages: float  # of the host's memory, for each fetched row

    def __str__(self) -> str:
        return f"{100 * self.guests:.0f} % of the guests changed, {self.pages:.2f} pages per row"


def find_changes(rnn: msrnn.MultiStateRNN, state: MultiState, tokens: Iterator[Tensor]) -> Changes:
    guests, fetched, pages, before = 0, 0, 0, None
    layers = [layer for layer in state.layers if isinstance(layer, RecallSlots)]
    row = (layers[0].guest_keys.shape[-1] + layers[0].guest_values.shape[-1]) * layers[0].guest_keys.itemsize
    for _ in range(STEPS):
        rnn.step(next(tokens), state)
        now = torch.stack([layer.guest_position for layer in layers]).flatten(0, -2)  # of each KV head of each layer
        if before is not None:
            changed = now != before
            page = now // (PAGE // row) + 2**20 * torch.arange(len(now), device=now.device)[:, None]
            pages += page[changed].unique().numel()
            guests, fetched = guests + changed.numel(), fetched + int(changed.sum())
        before = now
    return Changes(fetched / guests, pages / max(fetched, 1))


def steps_by_changes(
    rnn: msrnn.MultiStateRNN, state: MultiState, tokens: Iterator[Tensor], queries: Alike, rounds: int
) -> dict[str, list[float]]:
    """The milliseconds of steps whose queries have less or more in common."""
    stepping = {}
    for share in ALIKE:
        queries.set_share(share)
        changes = find_changes(rnn, state, tokens)
        stepping[f"with, {changes}"] = step_milliseconds(rnn, state, tokens, rounds)
    queries.set_share(0.0)
    return stepping


def device_gigabytes(rnn: msrnn.MultiStateRNN, tokens: int) -> float:
    """What is allocated on the device, without the 8-bit copies of the keys of this number of tokens."""
    copied = -(-tokens // SEGMENT) * SEGMENT * rnn.spec.index_row_nbytes
    return (torch.cuda.memory_allocated() - copied) / 1e9


def read_seconds(rnn: msrnn.MultiStateRNN, ids: Tensor, rounds: int) -> list[float]:
    def read() -> None:
        rnn.read(ids, rnn.state(), last_only=True)

    for _ in range(WARM_UP):
        read()
    return [timed(read) for _ in range(rounds)]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random-weights", default="llama-3-8b", help="a shape, such as llama-2-7b")
    parser.add_argument("--archived", type=int, default=100_000, help="tokens of the archive")
    parser.add_argument("--recall", type=int, default=256, help="rows of each KV head")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument(
        "--alike-keys",
        type=float,
        nargs="*",
        default=[0.7, 0.9],
        help=f"shares of a key's square that {SPAN} tokens have in common; the text is read once for each",
    )
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; run this on a machine with a GPU")
    if args.archived <= TEXT:
        parser.error(f"--archived {args.archived}: must be more than {TEXT:,}, the tokens that are read first")
    torch.manual_seed(0)
    model: Any = random_model(args.random_weights)
    text, tokens = (
        torch.randint(model.config.vocab_size, (1, count), device=model.device) for count in (args.archived, 4096)
    )
    queries = Alike(model, "q_proj")
    what = f"{args.random_weights}, echo {args.size} + {args.recall}"

    reading: dict[str, list[float]] = {}
    without: list[float] = []
    stepping: dict[str, list[float]] = {}
    whole: dict[str, list[float]] = {}
    for name, recall in (("without", 0), ("with", args.recall)):
        rnn = msrnn.MultiStateRNN(model, "echo", args.size, recall=recall)
        reading[name] = read_seconds(rnn, text[:, :TEXT], args.rounds)
        state = rnn.state()
        rnn.read(text[:, :TEXT], state, last_only=True)
        before = device_gigabytes(rnn, TEXT)
        whole[name] = [timed(rnn.read, text[:, TEXT:], state, last_only=True)]
        after = device_gigabytes(rnn, args.archived)
        report(
            f"the device {name} recall, without {rnn.spec.index_row_nbytes:,} bytes per token of copied keys, {what}",
            {f"after {TEXT:,} tokens": [before], f"after {args.archived:,}": [after]},
            "GB",
        )
        following = iter(tokens.split(1, 1))
        if not recall:
            without = step_milliseconds(rnn, state, following, args.rounds)
        else:
            fork, question = state.fork(1), tokens[:, -QUESTION:]
            asked = [timed(rnn.read, question, fork, last_only=True, recall_every=1) for _ in range(WARM_UP)]
            report(f"a question of {QUESTION} tokens, {what}", {"first": asked[:1], "later": asked[1:]}, "s")
            del fork
            stepping = steps_by_changes(rnn, state, following, queries, args.rounds)
        del state
        rnn.release()
    keys = Alike(model, "k_proj", -(-args.archived // SPAN))
    rnn = msrnn.MultiStateRNN(model, "echo", args.size, recall=args.recall)
    for share in args.alike_keys:
        keys.set_share(share)
        state = rnn.state()
        rnn.read(text, state, last_only=True)
        stepping |= steps_by_changes(rnn, state, iter(tokens.split(1, 1)), queries, args.rounds)
        del state
    report(f"reading {TEXT:,} tokens with an archive, {what}", reading, "s", target=1.15)
    report(f"the first read of {args.archived - TEXT:,} more tokens, {what}", whole, "s")
    for name, steps in stepping.items():
        report(
            f"a step at {args.archived:,} archived tokens, {what}", {"without": without, name: steps}, "ms", target=2.0
        )


if __name__ == "__main__":
    main()
