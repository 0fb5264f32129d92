"""A Ray cluster of this machine, a model that its processes load, and the processes by name."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.characters import character_model, character_tokenizer


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'msrnn[ray]'")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    character_model().save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def processes(name: str) -> list[int]:
    found = subprocess.run(["pgrep", "-f", name], capture_output=True, text=True, check=False)
    return [int(number) for number in found.stdout.split()]
