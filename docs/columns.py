"""A griffe extension for the site: turns the two-column argument lists of docstrings into Markdown lists."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ENTRY = re.compile(r"^(\w+(?:, \w+)*) {2,}(\S.*)$")


def as_list(text: str) -> str:
    lines: list[str] = []
    indent = 0  # of the second column, while in a list
    for line in text.splitlines():
        if entry := ENTRY.match(line):
            names = ", ".join(f"`{name}`" for name in entry[1].split(", "))
            lines.append(f"- {names}: {entry[2]}")
            indent = entry.start(2)
        elif indent and line.startswith(" " * indent) and line.strip():
            lines.append(f"  {line.strip()}")
        else:
            indent = 0
            lines.append(line)
    return "\n".join(lines)


class Columns(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_list(obj.docstring.value)
