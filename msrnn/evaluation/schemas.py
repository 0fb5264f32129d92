"""The fields of a stored record. A file may be old, edited or damaged, so each record is checked when it is read."""

from __future__ import annotations

import reprlib
from typing import Any

from pydantic import BaseModel, ConfigDict, InstanceOf, ValidationError, model_validator

from msrnn.evaluation.store import Check, Record

Text = InstanceOf[str]  # a plain `str` field would refuse half of a surrogate pair, which JSON can hold


class Schema(BaseModel):
    """The required fields of a record; it may have more. A number is not taken from a string, nor from true."""

    model_config = ConfigDict(strict=True, extra="ignore")


class ChunkSchema(Schema):
    """A record with one loss for each chunk of text."""

    chunks: list[Text]
    nll: list[Any]

    @model_validator(mode="after")
    def _check_pairs(self) -> ChunkSchema:
        if len(self.chunks) != len(self.nll):
            raise ValueError(f"{len(self.chunks)} chunks with {len(self.nll)} nll")
        return self


def check_of(kind: type[Schema]) -> Check:
    """A check that describes the fault of a record of this kind."""

    def check(record: Record) -> str | None:
        try:
            kind.model_validate(record)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            if not first["loc"]:
                return str(first["ctx"]["error"])
            name = str(first["loc"][0])
            if name not in record:
                return f"without the field {name!r}"
            return f"its field {name!r} is {reprlib.repr(record[name])}"
        return None

    return check
