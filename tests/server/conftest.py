"""One server for all tests of a file; a tiny model answers, with a real tokenizer.

Engines look at the tokens of a step at once, as on a CPU; a file may ask for the other order, see step_orders.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import msrnn
from msrnn.hf.loading import Loaded
from msrnn.server.limits import Limits
from tests.helpers.characters import character_model, character_tokenizer
from tests.helpers.live_server import running
from tests.helpers.page_browser import Visit, until
from tests.helpers.step_orders import use_order
from tests.helpers.tiny import build, llama


@pytest.fixture(scope="module", autouse=True)
def overlaps(request: pytest.FixtureRequest) -> Iterator[bool]:
    order = bool(getattr(request, "param", False))
    with pytest.MonkeyPatch.context() as patch:
        use_order(patch, order)
        yield order


@pytest.fixture(scope="module")
def rnn(small: Loaded) -> msrnn.MultiStateRNN:
    return msrnn.MultiStateRNN(build(llama(vocab_size=len(small.tokenizer), eos_token_id=None), "cpu"), "tova", 16)


@pytest.fixture(scope="module")
def engine(rnn: msrnn.MultiStateRNN, small: Loaded, overlaps: bool) -> msrnn.Engine:
    return msrnn.Engine(rnn, slots=4, tokenizer=small.tokenizer)


@pytest.fixture(scope="module")
def address(engine: msrnn.Engine) -> Iterator[str]:
    with running(engine) as found:
        yield found


@pytest.fixture(scope="module")
def open_address(engine: msrnn.Engine) -> Iterator[str]:
    with running(engine, Limits()) as found:
        yield found


@pytest.fixture
def visit(chromium: Any) -> Iterator[Visit]:
    """`visit(address)` opens the page; at the end, the console may have only the errors that the test names."""
    expected: list[str] = []

    def visit(address: str, errors: tuple[str, ...] = (), width: int = 1280, dark: bool = False) -> Any:
        expected.extend(errors)
        shape = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600}
        chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shape)
        wanted = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})
        chromium.get(address)
        chromium.execute_script("localStorage.clear(); sessionStorage.clear()")
        chromium.get("about:blank")
        chromium.get(address)
        until(chromium, "document.documentElement.dataset.ready || document.querySelector('dialog[open]')")
        return chromium

    yield visit
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    complaints = [entry["message"] for entry in chromium.get_log("browser")]
    assert [message for message in complaints if not any(error in message for error in expected)] == []


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a tiny model, for a server in a process of its own."""
    character_model().save_pretrained(tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"
