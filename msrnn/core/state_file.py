"""State files: safetensors with a JSON description, written completely or not at all.

Only their owner can read them: a description may hold the tokens of a prompt in clear, and keys and values tell of it.
The description has the number of the format. A file without one is older than the number, and of the first format.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from msrnn.core.atomic import PRIVATE, write_atomically
from msrnn.errors import FileError, UsageError

FORMAT = 2  # raised by a change that makes a file unreadable, or misread, by the code before it
ONE_FILE = 1  # the format of a file that has all of a state; since 2, it may name others that have a part
_KEY, _CHECKSUM, _FORMAT = "msrnn", "checksum", "format"


def checksum(tensors: dict[str, Tensor]) -> str:
    """The SHA-256 digest of names, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        numbers: Any = tensor.contiguous().flatten().view(torch.uint8).numpy()
        digest.update(numbers)
    return digest.hexdigest()


def save_tensors(
    path: Path,
    tensors: dict[str, Tensor],
    description: dict[str, Any],
    write_others: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Write a file. `write_others` writes those that it names, before it -> what is added to its description."""
    saved = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def write(to: Path) -> None:
        named = write_others()
        about = {**description, **named, _FORMAT: FORMAT if named else ONE_FILE, _CHECKSUM: checksum(saved)}
        metadata = {_KEY: json.dumps(about)}
        try:
            save_file(saved, to, metadata=metadata)
        except SafetensorError as error:
            raise _system_error(error, path) from error

    write_atomically(path, write, PRIVATE)


def _system_error(error: SafetensorError, path: Path) -> Exception:
    """The operating system's error (a full disk, for example), which safetensors reports only as text."""
    match = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(match[1]), os.strerror(int(match[1])), str(path)) if match else FileError(str(error), path)


def load_description(path: Path) -> dict[str, Any]:
    """The description alone, which is small; the tensors are not read."""
    with _open(path) as (_, description):
        return description


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and description. Refuses a file whose tensors do not match its checksum."""
    with _open(path) as (file, description):
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if description.get(_CHECKSUM, expected := checksum(tensors)) != expected:
        raise FileError("damaged, its values do not match its checksum", path, advice="use a copy, or create it again")
    return tensors, description


@contextmanager
def _open(path: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    if not path.is_file():
        what = "not a regular file" if path.exists() else "no such file"
        raise FileError(what, path, advice="name a saved state")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if _KEY not in metadata:
                raise FileError(
                    "not a state that msrnn saved", path, advice="name a file written by state.save or --save"
                )
            description = json.loads(metadata[_KEY])
            if not isinstance(description, dict):
                raise FileError(
                    f"not a state that msrnn saved, its description is {description!r:.40}", path, advice="use another"
                )
            _check_format(path, description.get(_FORMAT, 1))
            yield file, description
    except UsageError:
        raise
    except (SafetensorError, ValueError, RecursionError) as error:
        raise FileError(
            f"truncated, or not a state that msrnn saved ({error})", path, advice="use a copy, or another file"
        ) from error


def _check_format(path: Path, found: object) -> None:
    if type(found) is not int or found < 1:
        raise FileError(f"not a state that msrnn saved, its format is {found!r:.40}", path, advice="use another")
    if found > FORMAT:
        raise FileError(
            f"its format is {found}, and this version of msrnn reads formats up to {FORMAT}",
            path,
            advice="install a newer msrnn, or make the state again with this one",
        )
