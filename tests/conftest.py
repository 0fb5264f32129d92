from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

if "PYTEST_XDIST_WORKER" in os.environ:  # one thread each, in the processes that they start, too
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")

# Tests speak plain HTTP to this machine, and httpx would read the certificates of all authorities for each client.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.devnull

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run in triton's interpreter

from importlib.util import find_spec
from typing import Any

import hypothesis
import pytest
from transformers.utils import logging

from msrnn.hf.loading import Loaded, load
from tests.helpers import interpreted as interpreted

logging.set_verbosity_error()
hypothesis.settings.register_profile("patient", deadline=None)  # a machine that is busy is no failure
hypothesis.settings.load_profile("patient")

# The server's tests need no GPU, and a machine that has one may lack the packages of the server.
if torch.cuda.is_available() and find_spec("starlette") is None:
    collect_ignore = ["server", "cli/test_serve.py"]

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def small() -> Loaded:
    """The small default model; what wants it is skipped, with the reason, where it is not installed."""
    try:
        return load(device="cpu", dtype="float32")
    except ValueError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A headless browser; tests that use it are skipped if it is not installed."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (browser and driver):
        pytest.skip("the page is tested in Chromium: apt install chromium chromium-driver")
    selenium = pytest.importorskip("selenium.webdriver", reason="Chromium is driven by selenium: pip install selenium")
    options = selenium.ChromeOptions()
    options.binary_location = browser
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{argument}")
    options.add_argument("--host-resolver-rules=MAP rebound.example 127.0.0.1")  # as an attacker's DNS server could
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    started.set_script_timeout(60)
    yield started
    started.quit()
