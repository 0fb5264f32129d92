"""Checks of the options of `msrnn serve`, all of them before a model is loaded."""

from __future__ import annotations

import ipaddress
import shlex
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from msrnn.cli.options import check_cpus
from msrnn.errors import UsageError

MOST_SECONDS = 86_400


def check(port: int, counts: Mapping[str, int | None], seconds: int, name: str | None, keys: Sequence[str]) -> None:
    """`counts` are the options that must be at least 1, by their names."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port}: must be from 0 to 65535")
    for option, count in counts.items():
        if count is not None and count < 1:
            raise UsageError(f"{option} {count}: must be a whole number, 1 or more")
    if not 0 <= seconds <= MOST_SECONDS:
        raise UsageError(f"--shutdown-timeout {seconds}: must be from 0 to {MOST_SECONDS} seconds")
    if name is not None and not (name.strip() and name.isprintable()):
        raise UsageError(f"--name {name!r}: must be a word or more, without line breaks; leave it out for the model's")
    if not all(key and key == key.strip() and key.isascii() and key.isprintable() for key in keys):
        raise UsageError("--api-key: must not be empty, must not begin or end with a space, and must be plain ASCII")


def check_tokens(max_tokens: int, max_total_tokens: int) -> None:
    if max_tokens >= max_total_tokens:
        raise UsageError(
            f"--max-tokens {max_tokens}: must be less than --max-total-tokens, which is {max_total_tokens} and counts "
            "the prompt, too"
        )


def check_origins(origins: Sequence[str], keys: Sequence[str]) -> None:
    if "*" in origins and not keys:
        raise UsageError("--cors-origin *: any web page could use the model; add --api-key, or name the origins")


def check_folders(sessions: Path | None, prefix_states: Path | None) -> None:
    if sessions is not None and prefix_states is not None and sessions.resolve() == prefix_states.resolve():
        raise UsageError(f"--prefix-states {prefix_states}: is the folder of --sessions; name another one")


def remarks_on_folders(folders: Mapping[str, Path | None]) -> list[str]:
    """What to say of folders, by their options, that exist and that other users may enter, list or change."""
    found = []
    for option, folder in folders.items():
        if folder is not None and folder.is_dir() and (mode := stat.S_IMODE(folder.stat().st_mode)) & 0o077:
            reason = f"other users have access to this folder (mode {mode:04o}), which holds tokens of conversations"
            found.append(f"{option} {folder}: {reason}; run chmod 700 {shlex.quote(str(folder))}")
    return found


def check_replicas(replicas: int | None, ray: str | None, cpus: int | None) -> None:
    check_cpus(ray, cpus)
    if replicas is not None and replicas < 1:
        raise UsageError(f"--replicas {replicas}: must be 1 or more")
    if replicas is not None and ray is None:
        raise UsageError(f"--replicas {replicas}: they are processes of a Ray cluster; add --ray")


def is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
