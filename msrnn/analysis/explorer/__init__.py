"""Build the explorer's page. Text from outside is embedded as data, never as markup, and no other script may run."""

from __future__ import annotations

import base64
import json
import re
import unicodedata
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy
from transformers import PreTrainedModel

from msrnn.analysis.tagging import Passage
from msrnn.checks import check_count
from msrnn.errors import UsageError
from msrnn.hf.inspect import inspect_model
from msrnn.hf.rnn import MultiStateRNN
from msrnn.hf.trace import ChunkTrace, trace_chunks
from msrnn.policy import Policy
from msrnn.recall import Recall
from msrnn.size import Size
from msrnn.web import page_parts

SCRIPTS = ("data", "shades", "text", "axes", "maps", "card", "search", "address", "controls", "main")
MOST_TOKENS = 2**16 - 1  # a step is stored in two bytes
MOST_RECALLED = 2**29  # bits of a page, before they are deflated


class PolicyTrace(NamedTuple):
    """The trace of the text under one policy."""

    name: str
    size: int
    trace: ChunkTrace


def trace_policies(
    model: PreTrainedModel,
    ids: list[int],
    policies: Sequence[Policy],
    size: int,
    on_policy: Callable[[str], Callable[[int], object]],
    protect: int = 0,
    recall: Recall | None = None,
) -> list[PolicyTrace]:
    """Trace one text under each policy; its first `protect` tokens are never evicted.

    `on_policy` gets a policy's name, and returns a callback that counts tokens. With `recall`, every token recalls.
    """
    every = None if recall is None else recall.every
    if every is not None:
        check_recalled(len(ids), every, len(inspect_model(model).layers))
    rnns = [MultiStateRNN(model, policy, Size(size), recall=recall or 0) for policy in policies]
    for rnn in rnns:
        rnn.spec.check_protect(protect)  # before a token is read
    traces = []
    for policy, rnn in zip(policies, rnns, strict=True):
        (one,) = trace_chunks(rnn, [ids], on_policy(policy.name), range(protect), every)
        traces.append(PolicyTrace(policy.name, size, one))
    return traces


def token_texts(passage: Passage, tokenizer: Any) -> list[str]:
    """The text that each token adds; for a special token, which adds none, its name."""
    names = (str(tokenizer.decode([token])) for token in passage.ids)
    tokens = zip(passage.pieces, passage.spans, names, strict=True)
    return [name if start == stop else piece for piece, (start, stop), name in tokens]


def page(
    name: str,
    about: str,
    tokens: Sequence[str],
    policies: Sequence[PolicyTrace],
    protect: int = 0,
    every: int | None = None,
) -> str:
    """A whole HTML document. `tokens` are the texts of the tokens, the first `protect` of which were protected.

    All policies have the same layers. `every` is the number of tokens that recalled together; None: none did.
    """
    if not 0 < len(tokens) <= MOST_TOKENS:
        raise UsageError(f"{len(tokens):,} tokens: a page shows 1 to {MOST_TOKENS:,}; give a shorter text")
    data = {
        "name": visible(name),
        "about": visible(about),
        "tokens": [visible(token) for token in tokens],
        "wrapped": find_wrapped_tokens(tokens),
        "protected": protect,
        "every": every or 1,
        "layers": policies[0].trace.layers,
        "policies": [
            {
                "name": one.name,
                "size": one.size,
                "groups": one.trace.evicted_at.shape[1],
                "after": pack_trace(one.trace),
                "recalled": pack_recalled(one.trace),
            }
            for one in policies
        ],
    }
    parts = page_parts(__package__, SCRIPTS)
    return parts.document({"policy": parts.security_policy(), "data": embed_json(data)})


def pack_trace(trace: ChunkTrace) -> str:
    """Steps that each token stays after its own: all low bytes, then all high bytes (which repeat), deflated."""
    times = trace.evicted_at
    after = (times - numpy.arange(times.shape[-1])).astype(numpy.uint16).ravel()
    planes = (after & 255).astype(numpy.uint8).tobytes() + (after >> 8).astype(numpy.uint8).tobytes()
    return base64.b64encode(zlib.compress(planes, 9)).decode()


def pack_recalled(trace: ChunkTrace) -> str | None:
    """A bit for each block, layer and token: whether some KV head recalled it; deflated. None: nothing was recalled."""
    if trace.recalled is None:
        return None
    return base64.b64encode(zlib.compress(numpy.packbits(trace.recalled, bitorder="little").tobytes(), 9)).decode()


def check_recalled(tokens: int, every: int, layers: int) -> None:
    """Refuse more recalled tokens than a page can hold."""
    check_count("recall_every", every, of="tokens")
    least = -(-tokens * tokens * layers // MOST_RECALLED)
    if every < least:
        raise UsageError(
            f"a page of {tokens:,} tokens needs {least:,} at least",
            name="recall_every",
            value=every,
            advice="show fewer tokens, or let more of them share what they recall",
        )


def embed_json(data: Any) -> str:
    """JSON that can neither end the element that contains it nor begin another: ASCII without markup characters."""
    text = json.dumps(data, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def visible(text: str) -> str:
    """Show characters that would hide or reorder their neighbours by name or number; replace lone surrogates."""
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    code = ord(character)
    if character in "\n\t" or code in (0x200C, 0x200D):  # joiners are part of how some scripts are written
        return character
    if code < 32:
        return chr(0x2400 + code)
    if code == 127:
        return "\N{SYMBOL FOR DELETE}"
    kind = unicodedata.category(character)
    if kind == "Cs":
        return "\N{REPLACEMENT CHARACTER}"
    return f"[U+{code:04X}]" if kind in ("Cc", "Cf", "Zl", "Zp") else character


# Hard-wrapped texts: the page shows line breaks inside a paragraph as spaces.
#
# A line was wrapped at column W if it fits into W and the first word of the next line would not have fitted behind it.
# So each line break allows a range of columns. The column that most breaks allow is the text's, if nearly all breaks
# agree. Verse, code and lists do not: they break lines where the next word would have fitted.

_LEAST_COLUMN, _MOST_COLUMN = 50, 130
_LEAST_BREAKS, _AGREEING = 3, 2 / 3  # breaks that a column must explain: their number, and their share of all
_SLACK = 0.9  # a line that ends this close to the column was wrapped as well: editors change words
_LONGEST_WORD = 30
_OWN_LINE = re.compile(r"\s|[-*+•>#|]|\d+[.)]\s")  # indented, or an item of a list, a quote, a heading, a table


class LineBreak(NamedTuple):
    """The line feed between two lines that are not blank."""

    at: int  # in characters
    width: int  # of the line before it
    needed: int  # width of that line with the next word on it


def find_wrapped_tokens(tokens: Sequence[str]) -> list[int]:
    """Indices of the tokens whose line feed only wraps a paragraph."""
    breaks = list(_line_breaks("".join(tokens)))
    column = _wrap_column(breaks)
    if column is None:
        return []
    ends = list(accumulate(map(len, tokens)))
    indices = (bisect_right(ends, one.at) for one in breaks if one.needed > _SLACK * column)
    # A token with more than one line feed ends a paragraph as well.
    return [token for token in indices if tokens[token].count("\n") == 1]


def _line_breaks(text: str) -> Iterator[LineBreak]:
    """Line breaks that may be wraps: the next line begins with a word."""
    lines, at = text.split("\n"), -1
    for line, following in pairwise(lines):
        at += len(line) + 1
        if not line.strip() or not following.strip() or _OWN_LINE.match(following):
            continue
        width, word = len(line.rstrip()), len(following.split(maxsplit=1)[0])
        if word <= _LONGEST_WORD:
            yield LineBreak(at, width, width + 1 + word)


def _wrap_column(breaks: list[LineBreak]) -> int | None:
    """The column at which the text is wrapped; None if it is not."""
    votes: Counter[int] = Counter()
    for one in breaks:
        votes.update(range(max(one.width, _LEAST_COLUMN), min(one.needed, _MOST_COLUMN + 1)))
    if not votes:
        return None
    column, count = votes.most_common(1)[0]
    return column if count >= max(_LEAST_BREAKS, _AGREEING * len(breaks)) else None
