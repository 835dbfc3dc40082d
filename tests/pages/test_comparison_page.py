"""The report's page in a real browser, at a phone's width and at a desk's, in light and in dark."""

from collections.abc import Iterator
from typing import Any

import pytest
from browser import CONTRAST, DESK, PHONE, headless, show
from comparisons import COMPARISON, LONG


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with headless() as driver:
        yield driver


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return COMPARISON.to_html(tmp_path_factory.mktemp("page") / "report.html").as_uri()


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
