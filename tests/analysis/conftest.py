from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.handmade import Visit


@pytest.fixture
def visit(chromium: Any, tmp_path: Path) -> Iterator[Visit]:
    """`visit(html)` opens a page, at a size and with a part of its address; at the end, its console must be empty."""
    from selenium.webdriver.support.ui import WebDriverWait

    def visit(html: str, where: str = "", width: int = 1280, height: int = 800) -> Any:
        path = tmp_path / "page.html"
        path.write_text(html, encoding="utf-8")
        shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shape)
        chromium.get("about:blank")
        chromium.get(f"{path.as_uri()}{where}")
        WebDriverWait(chromium, 20).until(lambda b: b.execute_script("return document.documentElement.dataset.ready"))
        return chromium

    yield visit
    complaints = chromium.get_log("browser")
    assert complaints == []
