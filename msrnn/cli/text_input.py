"""Texts that a verb reads: files, standard input, arguments, and Python's own manual."""

from __future__ import annotations

import sys
from pathlib import Path

from msrnn.errors import UsageError
from msrnn.evaluation.data.texts import decoded

MANUAL = "Python's own manual"
_MANUAL_TOPICS = ("objects", "naming", "exceptions", "import", "customization", "attribute-access", "types", "compound")


def read_text(source: str) -> str:
    """The text of a file, or of standard input for `-`."""
    data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    text = decoded(data, source)
    if not text.strip():
        raise UsageError(f"{source}: empty; give a text to read")
    return text


def as_utf8(text: str) -> str:
    """A typed text, with a replacement character for each byte that is not UTF-8: tokenizers refuse these."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def manual() -> str:
    """A text that every Python installation has: chapters of its language reference, in a fixed order."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in _MANUAL_TOPICS)


def text_or_file(source: str) -> tuple[str, str]:
    """A name and a text: the file of this name if there is one, standard input for `-`, or the argument itself."""
    if source == "-":
        return "text", read_text(source)
    if path := _existing(source):
        if path.is_dir():
            example = next((f", such as {file}" for file in sorted(path.glob("*.txt"))), "")
            raise UsageError(f"{path}: a folder; name a text file in it{example}")
        return path.stem, read_text(source)
    text = as_utf8(source)
    if not text.strip():
        raise UsageError("TEXT|FILE: empty; give a text or a file to read")
    if "\n" not in source and source.endswith((".txt", ".md")):
        raise UsageError(f"{source}: no such file; give an existing file or a text")
    if "\n" not in source and " " not in source.strip():
        raise UsageError(f"{source}: no such file, and a text of one word shows nothing; give a longer text")
    return "text", text


def _existing(source: str) -> Path | None:
    """The file, pipe or folder of this name."""
    path = Path(source)
    try:
        return path if source and path.exists() else None
    except (OSError, ValueError):  # too long for a file name, or with a null byte
        return None
