"""Certificates for this machine, which sign themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NEEDS_OPENSSL = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, which makes certificates")


def write_certificate(folder: Path, password: str | None = None) -> tuple[Path, Path]:
    """Write a certificate of 127.0.0.1 and its key; with a password, the key is encrypted."""
    folder.mkdir(exist_ok=True)
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    command += ["-nodes"] if password is None else ["-passout", f"pass:{password}"]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key
