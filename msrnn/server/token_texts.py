"""Single tokens: their text, their bytes, and how many characters they have at most."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece writes a space so
COMPOSED = 4  # characters that become one at most, when a text is normalized to NFC or NFKC
_SHRINKS = {"NFC": COMPOSED, "NFKC": COMPOSED, "NFD": 1, "NFKD": 1, "Prepend": 1, "Lowercase": 1}


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes bytes as: printable ones as they are, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()


class TokenTexts:
    """The texts and bytes of a tokenizer's tokens, each computed once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
        self._kinds = {*_kinds(_parts(tokenizer).get("decoder"))}
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}

    @staticmethod
    def of(tokenizer: Any) -> TokenTexts:
        return _texts_of(tokenizer, len(tokenizer))

    def text(self, token: int) -> str:
        """Its text alone; a part of a character is not text, and reads as U+FFFD."""
        if token not in self._texts:
            self._texts[token] = str(self._tokenizer.decode([token]))
        return self._texts[token]

    def raw(self, token: int) -> bytes:
        """Its bytes, also where these are a part of a character. Those of a text's tokens are the text's, in order."""
        if token not in self._bytes:
            self._bytes[token] = self._bytes_of(token)
        return self._bytes[token]

    def _bytes_of(self, token: int) -> bytes:
        if token in self._added:
            return str(self._added[token]).encode()
        name: str | None = self._tokenizer.convert_ids_to_tokens(token)
        if name is None or not self._kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
            return self.text(token).encode()
        if "ByteLevel" in self._kinds:
            known = all(character in _BYTES for character in name)
            return bytes(_BYTES[character] for character in name) if known else name.encode()
        byte = _BYTE.fullmatch(name) if "ByteFallback" in self._kinds else None
        return bytes.fromhex(byte[1]) if byte else name.replace(_SPACE, " ").encode()


@lru_cache(maxsize=8)
def _texts_of(tokenizer: Any, size: int) -> TokenTexts:
    """`size`: tokens may have been added since."""
    return TokenTexts(tokenizer)


def fewest_tokens(tokenizer: Any, text: str) -> int:
    """A number of tokens that a text has at least, without tokenizing it; 0 where nothing is certain."""
    bound = _bound(tokenizer, len(tokenizer))
    if bound is None:
        return 0
    size = len(text.encode().translate(None, bound.dropped)) if bound.dropped else len(text)
    return -(-size // bound.longest)


class _Bound(NamedTuple):
    longest: int  # characters that a token stands for at most; bytes, if some are dropped
    dropped: bytes  # that the vocabulary does not have, and that leave no token


@lru_cache(maxsize=8)
def _bound(tokenizer: Any, size: int) -> _Bound | None:
    """None where a token may stand for any number of characters, or any number of them may leave no token."""
    parts = _parts(tokenizer)
    added = parts.get("added_tokens", [])
    if not parts or any(token["lstrip"] or token["rstrip"] for token in added):  # which swallow spaces
        return None
    model, steps = parts["model"], [*_steps(parts["normalizer"], "normalizers")]
    splits = [*_steps(parts["pre_tokenizer"], "pretokenizers")]
    if model["type"] != "BPE" or not all(map(_keeps_characters, splits)):
        return None
    shrinks = [_shrinks(step) for step in steps]
    if None in shrinks:
        return None
    alphabet = {name: bytes([byte]) for name, byte in _BYTES.items()} if _is_byte_level(splits) else {}
    if model["byte_fallback"]:
        alphabet = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
    dropped = b"".join(byte for name, byte in alphabet.items() if name not in model["vocab"])
    if model["unk_token"] is None and (not alphabet or (dropped and (steps or model["byte_fallback"]))):
        return None
    if model["unk_token"] is not None and model["fuse_unk"] and (not alphabet or dropped):
        return None  # what is not in the vocabulary is one token together
    longest = max(map(len, [*model["vocab"], *(token["content"].encode() for token in added)]))
    return _Bound(longest * prod(filter(None, shrinks)), dropped if model["unk_token"] is None else b"")


def _is_byte_level(splits: list[dict[str, Any]]) -> bool:
    return any(step["type"] == "ByteLevel" for step in splits)


def _keeps_characters(split: dict[str, Any]) -> bool:
    if split["type"] == "Split":
        return bool(split["behavior"] != "Removed")
    return split["type"] in ("ByteLevel", "Metaspace", "Digits")


def _shrinks(step: dict[str, Any]) -> int | None:
    """How many characters a step of normalization makes one of, at most; None: any number."""
    if step["type"] != "Replace":
        return _SHRINKS.get(step["type"])
    replaced = step["pattern"].get("String")
    return 1 if replaced is not None and len(step["content"]) >= len(replaced) else None


def _parts(tokenizer: Any) -> dict[str, Any]:
    """The parts of a fast tokenizer; nothing for others."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return json.loads(backend.to_str()) if isinstance(backend, Tokenizer) else {}


def _steps(part: Any, inside: str) -> Iterator[dict[str, Any]]:
    """A part, or those of a sequence."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for each in part[inside]:
            yield from _steps(each, inside)
    else:
        yield part


def _kinds(part: Any) -> Iterator[str]:
    return (step["type"] for step in _steps(part, "decoders"))
