"""The notes of a session's file, checked: a file may be old, edited or damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from msrnn.errors import FileError

_LATEST = 2**40  # seconds since 1970: a time stamp beyond this year 36,812 is damage
Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, lt=_LATEST, allow_inf_nan=False)]


class SessionNotes(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    unread: list[Count]
    last: Count | None = None
    turns: Count
    created: Seconds
    updated: Seconds
    beginning: Annotated[str, Field(max_length=64)] = ""
    size: Annotated[int, Field(ge=1, lt=2**63)] | None = None


def check_notes(notes: Any, path: Path) -> dict[str, Any]:
    """The fields of the notes; an old file does not have the last token."""
    try:
        found = SessionNotes.model_validate(notes)
    except ValidationError as error:
        raise FileError("not a session that the engine saved", path, advice="move it out of this folder") from error
    unread = found.unread
    return {"last": unread[-1] if unread else None, **found.model_dump(exclude_unset=True)}
