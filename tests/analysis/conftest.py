from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from handmade import Visit


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
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    started.set_script_timeout(60)
    yield started
    started.quit()


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
