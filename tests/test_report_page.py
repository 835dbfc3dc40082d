"""The report's page in a real browser, at a phone's width and at a desk's, in light and in dark."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from comparisons import COMPARISON, LONG

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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
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
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return COMPARISON.to_html(tmp_path_factory.mktemp("page") / "report.html").as_uri()


def show(browser: Any, page: str, width: int, scheme: str = "light") -> None:
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get(page)


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_nothing_hangs_over_the_edge(browser: Any, page: str, width: int) -> None:
    show(browser, page, width)
    assert browser.execute_script("return innerWidth") == width
    assert browser.execute_script("const e = document.documentElement; return e.scrollWidth - e.clientWidth") == 0
    outside = """
        const edge = document.documentElement.clientWidth + 0.5;
        return [...document.querySelectorAll("body *")]
            .filter(e => !e.closest(".scroll") && e.getBoundingClientRect().right > edge)
            .map(e => e.outerHTML.slice(0, 80))"""
    assert browser.execute_script(outside) == []
    assert browser.get_log("browser") == []


def test_a_wide_table_scrolls_inside_its_box_on_a_phone_and_fits_on_a_desk(browser: Any, page: str) -> None:
    overflow = "const e = document.querySelector('.scroll'); return e.scrollWidth - e.clientWidth"
    show(browser, page, PHONE)
    assert browser.execute_script(overflow) > 0
    show(browser, page, DESK)
    assert browser.execute_script(overflow) == 0


@pytest.mark.parametrize(("width", "shown"), [(PHONE, "phone"), (DESK, "desk")])
def test_the_plot_is_drawn_for_its_width(browser: Any, page: str, width: int, shown: str) -> None:
    show(browser, page, width)
    visible = [plot for plot in browser.find_elements("css selector", "svg[role=img]") if plot.is_displayed()]
    assert [plot.get_attribute("class") for plot in visible] == [shown]
    assert len(visible[0].find_elements("css selector", ".point")) == sum(
        row.latency_ms is not None for row in COMPARISON.rows
    )
    heights = "return [...arguments[0].querySelectorAll('text')].map(e => e.getBoundingClientRect())"
    boxes = browser.execute_script(heights, visible[0])
    assert min(min(box["height"], box["width"]) for box in boxes if box["width"]) > 5
    assert min(max(box["height"], box["width"]) for box in boxes) >= 10, "text too small to read"


def test_every_row_site_and_name_is_there_as_text(browser: Any, page: str) -> None:
    show(browser, page, DESK)
    assert len(browser.find_elements("css selector", ".rows tbody tr")) == len(COMPARISON.rows)
    for element in browser.find_elements("css selector", "details:not([open]) summary"):
        element.click()
    text = browser.find_element("tag name", "body").text
    for word in (LONG, "blocks.3.attn", "4 × 16", "257 × 257", "a processor", "needs a Mac or an iPhone"):
        assert word in text


def test_light_and_dark_are_both_readable(browser: Any, page: str) -> None:
    contrasts = {}
    for scheme in ("light", "dark"):
        show(browser, page, DESK, scheme)
        contrasts[scheme] = browser.execute_script(CONTRAST)
    light, dark = contrasts["light"], contrasts["dark"]
    assert light["background"] != dark["background"]
    assert min(*light["ratios"], *dark["ratios"]) >= 4.5


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
    const texts = [...document.querySelectorAll("body *")].filter(e => !e.closest("svg")
        && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()));
    return {
        background: getComputedStyle(document.body).backgroundColor,
        ratios: texts.map(e => {
            const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
            return (a + 0.05) / (b + 0.05);
        }),
    };
"""
