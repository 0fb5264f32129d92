from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msrnn.errors import UsageError
from msrnn.server import checks
from msrnn.server.checks import describe_open_folders, is_local
from tests.helpers.certificates import NEEDS_OPENSSL, write_certificate


@pytest.mark.parametrize(
    ("check", "arguments", "name"),
    [
        (checks.check_counts, ({"slots": 0},), "slots"),
        (checks.check_counts, ({"slots": None, "queue": -1},), "queue"),
        (checks.check_address, (-1, 30), "port"),
        (checks.check_address, (65536, 30), "port"),
        (checks.check_address, (80, -1), "shutdown_timeout"),
        (checks.check_address, (80, 86_401), "shutdown_timeout"),
        (checks.check_days, (0,), "session_days"),
        (checks.check_days, (math.inf,), "session_days"),
        (checks.check_days, (math.nan,), "session_days"),
        (checks.check_tokens, (512, 512), "max_tokens"),
        (checks.check_names, ("", "auto"), "served_model_name"),
        (checks.check_names, ("a\nb", "auto"), "served_model_name"),
        (checks.check_names, ("tiny", "vllm"), "generation_config"),
        (checks.check_access, (["good", ""], []), "api_key"),
        (checks.check_access, ([" key"], []), "api_key"),
        (checks.check_access, (["schlüssel"], []), "api_key"),
        (checks.check_access, ([], ["*"]), "cors_origin"),
        (checks.check_folders, (Path("a"), Path("b/../a")), "prefix_states"),
        (checks.check_replicas, (0, "auto", None, False), "replicas"),
        (checks.check_replicas, (2, None, None, False), "replicas"),
        (checks.check_replicas, (None, "auto", None, True), "ray"),
    ],
)
def test_bad_arguments_are_refused_by_their_names(check: Callable[..., None], arguments: Any, name: str) -> None:
    with pytest.raises(UsageError) as refused:
        check(*arguments)
    assert refused.value.name == name


def test_good_arguments() -> None:
    checks.check_counts({"slots": None, "queue": 1})
    checks.check_address(0, 0)
    checks.check_address(65535, 86_400)
    checks.check_days(None)
    checks.check_days(0.001)
    checks.check_tokens(511, 512)
    checks.check_names("a model", "none")
    checks.check_access(["a-key"], ["*"])
    checks.check_access([], ["https://example.org"])
    checks.check_folders(Path("a"), Path("b"))
    checks.check_folders(None, None)
    checks.check_replicas(None, None, None, True)
    checks.check_replicas(2, "auto", None, False)


def test_replicas_are_not_processes_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="a model that torchrun's processes share has one server"):
        checks.check_replicas(2, "auto", None, False)


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    checks.check_packages()
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(UsageError, match=r"the package uvicorn is not installed: pip install 'msrnn\[serve\]'"):
        checks.check_packages()


def test_addresses_beyond_this_machine() -> None:
    assert [is_local(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "example.org")] == [
        *[True] * 3,
        *[False] * 3,
    ]


def test_folders_that_others_can_read(tmp_path: Path) -> None:
    """One that the server makes is private; of one that exists, the mode stays, and a note says so."""
    shared, private = tmp_path / "my sessions", tmp_path / "private"
    for folder, mode in ((shared, 0o750), (private, 0o700)):
        folder.mkdir()
        folder.chmod(mode)
    assert describe_open_folders({"sessions": shared, "prefix_states": private}) == [
        f"sessions {shared}: other users have access to this folder (mode 0750), which holds tokens of "
        f"conversations; run chmod 700 '{shared}'"
    ]
    assert describe_open_folders({"sessions": None, "prefix_states": tmp_path / "new"}) == []


@NEEDS_OPENSSL
def test_files_of_https(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path / "one")
    other, _ = write_certificate(tmp_path / "other", password="secret")
    joint, text = tmp_path / "joint.pem", tmp_path / "text.pem"
    joint.write_text(certificate.read_text() + key.read_text())
    text.write_text("no certificate")
    checks.check_tls(None, None)
    checks.check_tls(certificate, key)
    checks.check_tls(joint, None)
    for wrong, name in (
        ((None, key), "ssl_keyfile"),
        ((tmp_path / "none", key), "ssl_certfile"),
        ((certificate, tmp_path / "none"), "ssl_keyfile"),
        ((certificate, tmp_path), "ssl_keyfile"),
        ((certificate, None), "ssl_certfile"),  # without its key
        ((text, key), "ssl_certfile"),
        ((other, key), "ssl_certfile"),
        ((other, other.with_name("key.pem")), "ssl_certfile"),  # a password is not asked for
    ):
        with pytest.raises(UsageError) as refused:
            checks.check_tls(*wrong)
        assert refused.value.name == name


def test_files_of_chat_templates(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages }} ä {% generation %}{% endgeneration %}", "utf-8")
    assert checks.read_chat_template(path) == "{{ messages }} ä {% generation %}{% endgeneration %}"
    wrong: list[tuple[bytes, str]] = [(b"{% for %}", "cannot be read"), (b"\xff", "not text in UTF-8"), (b" ", "empty")]
    for content, message in wrong:
        path.write_bytes(content)
        with pytest.raises(UsageError, match=message) as refused:
            checks.read_chat_template(path)
        assert (refused.value.name, refused.value.value) == ("chat_template", str(path))
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            checks.read_chat_template(missing)
