"""Checks of the arguments of `msrnn.serve`, all of them before a model is loaded."""

from __future__ import annotations

import ipaddress
import shlex
import ssl
import stat
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from msrnn.checks import check_count, check_folder, is_number, is_whole
from msrnn.core.ray_cluster import check_cpus
from msrnn.core.torchrun import is_torchrun
from msrnn.errors import UsageError
from msrnn.hf.model_options import AUTO
from msrnn.hf.template_variables import find_variables

MOST_SECONDS = 86_400
NONE = "none"  # of generation_config: neutral sampling defaults
_PACKAGES = ("starlette", "uvicorn", "prometheus_client")  # those of the extra `serve`


def check_counts(counts: Mapping[str, int | None]) -> None:
    """Arguments that must be at least 1, by their names; None: not given."""
    for name, count in counts.items():
        if count is not None:
            check_count(name, count)


def check_address(port: int, shutdown_timeout: int) -> None:
    if not (is_whole(port) and 0 <= port <= 65535):
        raise UsageError("must be a whole number from 0 to 65535", name="port", value=port)
    if not (is_whole(shutdown_timeout) and 0 <= shutdown_timeout <= MOST_SECONDS):
        raise UsageError(
            f"must be a whole number from 0 to {MOST_SECONDS} seconds", name="shutdown_timeout", value=shutdown_timeout
        )


def check_tls(certificate: Path | None, key: Path | None) -> None:
    """Refuse files that no HTTPS server can use."""
    if certificate is None:
        if key is not None:
            raise UsageError(
                "is the key of a certificate", name="ssl_keyfile", value=str(key), advice="give ssl_certfile as well"
            )
        return
    for name, path in (("ssl_certfile", certificate), ("ssl_keyfile", key)):
        if path is not None and not path.is_file():
            raise UsageError("no such file", name=name, value=str(path), advice="give a file in the PEM format")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")  # asks no one for it
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        advice = "give a certificate and its key, without a password, in the PEM format"
        raise UsageError(
            f"cannot be used ({reason})", name="ssl_certfile", value=str(certificate), advice=advice
        ) from error


def read_chat_template(path: Path) -> str:
    """The text of a file that has a chat template."""
    try:
        text = path.read_text("utf-8")
        find_variables(text)
    except OSError as error:
        raise UsageError(
            f"cannot be read ({error.strerror})", name="chat_template", value=str(path), advice="give a file"
        ) from error
    except UnicodeError as error:
        raise UsageError(
            "is not text in UTF-8", name="chat_template", value=str(path), advice="give a Jinja template"
        ) from error
    except UsageError as error:
        raise UsageError(str(error), name="chat_template", value=str(path), advice="correct it") from error
    if not text.strip():
        raise UsageError("is empty", name="chat_template", value=str(path), advice="give a Jinja template")
    return text


def check_days(session_days: float | None) -> None:
    if session_days is not None and not (is_number(session_days) and session_days > 0):
        raise UsageError(
            "must be above 0", name="session_days", value=session_days, advice="leave it out to delete none"
        )


def check_tokens(max_tokens: int, max_total_tokens: int) -> None:
    if max_tokens >= max_total_tokens:
        raise UsageError(
            f"must be less than max_total_tokens, which is {max_total_tokens} and counts the prompt, too",
            name="max_tokens",
            value=max_tokens,
        )


def check_names(served_model_name: str, generation_config: str) -> None:
    if not (isinstance(served_model_name, str) and served_model_name.strip() and served_model_name.isprintable()):
        raise UsageError(
            "must be a word or more, without line breaks",
            name="served_model_name",
            value=served_model_name,
            advice="leave it out for the model's",
        )
    if generation_config not in (AUTO, NONE):
        raise UsageError(f"must be {AUTO} or {NONE}", name="generation_config", value=generation_config)


def check_access(keys: Sequence[str], cors_origins: Sequence[str]) -> None:
    if not all(
        isinstance(key, str) and key and key == key.strip() and key.isascii() and key.isprintable() for key in keys
    ):
        raise UsageError(
            "must not be empty, must not begin or end with a space, and must be plain ASCII", name="api_key"
        )
    if "*" in cors_origins and not keys:
        raise UsageError(
            "any web page could use the model", name="cors_origin", value="*", advice="add a key, or name the origins"
        )


def check_folders(sessions: Path | None, prefix_states: Path | None) -> None:
    for name, folder in (("sessions", sessions), ("prefix_states", prefix_states)):
        if folder is not None:
            check_folder(name, folder)
    if sessions is not None and prefix_states is not None and sessions.resolve() == prefix_states.resolve():
        raise UsageError(
            "is the folder of the sessions", name="prefix_states", value=str(prefix_states), advice="name another one"
        )


def check_replicas(replicas: int | None, ray: str | None, cpus: int | None, loaded: bool) -> None:
    """Refuse what is for a Ray cluster without one, and a cluster for a model that is loaded or shared already."""
    check_cpus(ray, cpus)
    check_counts({"replicas": replicas})
    if replicas is not None and ray is None:
        raise UsageError(
            "they are processes of a Ray cluster", name="replicas", value=replicas, advice="add ray (--ray)"
        )
    if ray is not None and is_torchrun():
        raise UsageError(
            "a model that torchrun's processes share has one server", name="ray", advice="leave one of them out"
        )
    if ray is not None and loaded:
        raise UsageError("replicas load the model themselves", name="ray", advice="give the name of the model")


def check_packages() -> None:
    if missing := [package for package in _PACKAGES if find_spec(package) is None]:
        raise UsageError(f"the package {missing[0]} is not installed: pip install 'msrnn[serve]'")


def describe_open_folders(folders: Mapping[str, Path | None]) -> list[str]:
    """A remark for each folder, by its parameter, that exists and that other users may enter, list or change."""
    found = []
    for name, folder in folders.items():
        if folder is not None and folder.is_dir() and (mode := stat.S_IMODE(folder.stat().st_mode)) & 0o077:
            reason = f"other users have access to this folder (mode {mode:04o}), which holds tokens of conversations"
            found.append(f"{name} {folder}: {reason}; run chmod 700 {shlex.quote(str(folder))}")
    return found


def is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
