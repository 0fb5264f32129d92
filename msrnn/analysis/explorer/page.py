"""The page's parts put together. Text from outside is data: it is never markup, and nothing else may run."""

from __future__ import annotations

import base64
import hashlib
import json
import unicodedata
import zlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import numpy

from msrnn.analysis.explorer.wrapped import wrapped
from msrnn.analysis.trace_store import Traced
from msrnn.errors import UsageError

SCRIPTS = ("data", "shades", "text", "axes", "maps", "story", "search", "address", "controls", "main")
LONGEST = 2**16 - 1  # tokens: steps are two bytes each


class Shown(NamedTuple):
    """What one policy made of the text."""

    name: str
    size: int
    traced: Traced


def page(name: str, about: str, tokens: Sequence[str], policies: Sequence[Shown]) -> str:
    """A whole HTML document. `tokens` are the pieces of the text; all policies are of the same layers."""
    if not 0 < len(tokens) <= LONGEST:
        raise UsageError(f"{len(tokens):,} tokens: a page shows 1 to {LONGEST:,}")
    layers = policies[0].traced.layers
    data = {
        "name": visible(name),
        "about": visible(about),
        "tokens": [visible(token) for token in tokens],
        "wrapped": wrapped(tokens),
        "layers": layers,
        "policies": [_policy(one) for one in policies],
    }
    style, script = _part("page.css"), "\n".join(["'use strict';", *(_part(f"page.{part}.js") for part in SCRIPTS)])
    filled = {"policy": _security(style, script), "style": style, "script": script, "data": embedded(data)}
    document = _part("page.html")
    for slot, text in filled.items():
        before, after = document.split(f"{{{{{slot}}}}}")
        document = before + text + after
    return document


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _policy(one: Shown) -> dict[str, Any]:
    groups = one.traced.evicted_at.shape[1]
    return {"name": one.name, "size": one.size, "groups": groups, "after": packed(one.traced)}


def packed(traced: Traced) -> str:
    """Steps from birth to the last, as the low bytes of all and then the high ones (which repeat), deflated."""
    times = traced.evicted_at
    after = (times - numpy.arange(times.shape[-1])).astype(numpy.uint16).ravel()
    planes = (after & 255).astype(numpy.uint8).tobytes() + (after >> 8).astype(numpy.uint8).tobytes()
    return base64.b64encode(zlib.compress(planes, 9)).decode()


def embedded(data: Any) -> str:
    """JSON that cannot end the element it stands in, nor begin another: ASCII, and no character of markup."""
    text = json.dumps(data, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def visible(text: str) -> str:
    """Characters that would hide or reorder their neighbours, by name or number; halves of pairs are replaced."""
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


def _security(style: str, script: str) -> str:
    """Nothing may be loaded, and nothing run but these very bytes."""
    allowed = (
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in (style, script)
    )
    return "default-src 'none'; style-src {}; script-src {}; base-uri 'none'; form-action 'none'".format(*allowed)
