"""What single tokens stand for: their text, their bytes, and how many characters at most."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece writes a space so
COMPOSED = 4  # characters that become one at most, when a text is normalized to NFC or NFKC
_KEEPS_LENGTH = {"NFC": COMPOSED, "NFKC": COMPOSED, "NFD": 1, "NFKD": 1, "Prepend": 1, "Lowercase": 1}


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


def most_characters(tokenizer: Any) -> int | None:
    """The characters that one token stands for at most; None where a token may stand for any number."""
    return _most_characters(tokenizer, len(tokenizer))


@lru_cache(maxsize=8)
def _most_characters(tokenizer: Any, size: int) -> int | None:
    parts = _parts(tokenizer)
    added = parts.get("added_tokens", [])
    if not parts or any(token["lstrip"] or token["rstrip"] for token in added):  # which swallow spaces
        return None
    factor = 1
    for step in _steps(parts.get("normalizer"), "normalizers"):
        if step["type"] == "Replace":
            if len(step["content"]) < len(step["pattern"].get("String", "")) or "String" not in step["pattern"]:
                return None
        elif step["type"] in _KEEPS_LENGTH:
            factor *= _KEEPS_LENGTH[step["type"]]
        else:
            return None
    splits = [*_steps(parts.get("pre_tokenizer"), "pretokenizers")]
    for step in splits:
        kept = step["type"] in ("ByteLevel", "Metaspace", "Digits")
        if not kept and not (step["type"] == "Split" and step["behavior"] != "Removed"):
            return None
    model = parts["model"]
    if model["type"] != "BPE":
        return None
    alphabet = [*_BYTES] if any(step["type"] == "ByteLevel" for step in splits) else []
    if model["byte_fallback"]:
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    has_all = bool(alphabet) and all(name in model["vocab"] for name in alphabet)
    if not has_all and (model["unk_token"] is None or model["fuse_unk"]):
        return None  # what is not in the vocabulary is dropped, or is one token together
    names = [*model["vocab"], *(token["content"] for token in added)]
    return factor * max(map(len, names))


def _parts(tokenizer: Any) -> dict[str, Any]:
    """What a fast tokenizer is made of; nothing for others."""
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
