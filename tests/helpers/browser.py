"""A headless browser for the tests of pages, and what every page must hold to."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
PHONE, DESK = 360, 1280
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


@contextmanager
def headless() -> Iterator[Any]:
    """A browser without a network; the test is skipped, naming the tool, where one is missing."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    for tool, found in (("chromium", BROWSER), ("chromedriver", DRIVER)):
        if found is None:
            pytest.skip(f"{tool} is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in ARGUMENTS:
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def show(browser: Any, page: str, width: int, scheme: str = "light") -> None:
    """Load a page at a width, in light or in dark."""
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get("about:blank")
    browser.get(page)


# The WCAG contrast of every text against what is painted behind it.
CONTRAST = """
    const channels = colour => colour.match(/[\\d.]+/g).map(Number);
    const light = colour => channels(colour).slice(0, 3)
        .map(c => c / 255).map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = e => {
        const colour = getComputedStyle(e).backgroundColor;
        return channels(colour)[3] === 0 ? behind(e.parentElement) : colour;
    };
    const texts = [...document.querySelectorAll("body *")].filter(e => !e.closest("svg, script, template")
        && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()));
    return {
        background: getComputedStyle(document.body).backgroundColor,
        ratios: texts.map(e => {
            const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
            return (a + 0.05) / (b + 0.05);
        }),
    };
"""
