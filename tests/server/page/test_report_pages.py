"""Pages that commands write, in a browser: what is wider than the window shows that it scrolls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome

from outrider.report.page import Section, code, page, table

WIDE = page(
    "Wide",
    [Section("", [table([f"column {i}" for i in range(14)], [["12.3 ms"] * 14]), code("outrider " + "word " * 40)])],
)
# The colours of a screenshot at some places; a canvas reads it.
READ = """
const [shot, places, done] = arguments;
const image = new Image();
image.onload = () => {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.width, image.height];
  const drawing = canvas.getContext("2d");
  drawing.drawImage(image, 0, 0);
  done(places.map(([x, y]) => [...drawing.getImageData(x, y, 1, 1).data].slice(0, 3)));
};
image.src = "data:image/png;base64," + shot;
"""
EDGES = """
const box = document.querySelector(arguments[0]).getBoundingClientRect();
return [[box.left + 1, box.top + 3], [(box.left + box.right) / 2, box.top + 3], [box.right - 2, box.top + 3]];
"""


def shadows(driver: Chrome, css: str) -> tuple[bool, bool]:
    """Whether the left and the right edge of an element differ from its middle."""
    places: Any = driver.execute_script(EDGES, css)
    left, middle, right = driver.execute_async_script(READ, driver.get_screenshot_as_base64(), places)

    def differs(edge: list[int]) -> bool:
        return max(abs(a - b) for a, b in zip(edge, middle, strict=True)) > 40

    return differs(left), differs(right)


def show(driver: Chrome, width: int, scheme: str) -> None:
    size = {"width": width, "height": 700, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("css", [".wide", "pre"])
def test_what_is_wider_than_the_window_has_a_shadow_where_there_is_more(
    driver: Chrome, tmp_path: Path, css: str, scheme: str
) -> None:
    file = tmp_path / "page.html"
    file.write_text(WIDE, encoding="utf-8")
    driver.get(file.as_uri())
    show(driver, 420, scheme)
    scroll = "document.querySelector(arguments[0]).scrollLeft = arguments[1]"
    seen: list[tuple[bool, bool]] = []
    for at in (0, 60, 10_000):
        driver.execute_script(scroll, css, at)
        seen.append(shadows(driver, css))
    assert seen == [(False, True), (True, True), (True, False)]
    assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth"), "the page itself fits"
    driver.execute_script("document.body.style.maxWidth = 'none'")
    show(driver, 2600, scheme)
    assert shadows(driver, css) == (False, False)


def test_a_number_stays_with_its_unit(driver: Chrome, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(WIDE, encoding="utf-8")
    driver.get(file.as_uri())
    show(driver, 420, "light")
    height = "return document.querySelectorAll('td')[1].getBoundingClientRect().height"
    narrow = driver.execute_script(height)
    show(driver, 2600, "light")
    assert narrow == driver.execute_script(height), "one line in any window"
