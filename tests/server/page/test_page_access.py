"""The page in a browser for everybody: keyboards, screen readers, phones, light and dark."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import pytest
from page_driver import Page, answered
from scripted_api import TEXT
from selenium.webdriver.common.keys import Keys

AXE = "axe-core@4.14.0"


def test_origins_differ_in_more_than_colour(page: Page) -> None:
    answered(page)
    lines = {
        kind: page.run(f"getComputedStyle(document.querySelector('.tokens .{kind}')).borderBottomStyle")
        for kind in ("accepted", "recovered", "bonus")
    }
    assert lines == {"accepted": "solid", "recovered": "dashed", "bonus": "double"}
    clear = "getComputedStyle(document.querySelector('.tokens .plain')).borderBottomColor"
    assert page.run(clear) == "rgba(0, 0, 0, 0)"


def test_keyboard_only(page: Page) -> None:
    """From the prompt to the answer's tokens and the strip, with keys alone."""
    page.view("tokens")
    first = "document.querySelector('a[href], button, input, select, textarea, [tabindex]')"
    assert page.run(f"{first}.textContent") == "Skip to the prompt"
    page.run(f"{first}.focus()")
    page.keys(Keys.ENTER)
    page.keys("word", Keys.ENTER)
    page.idle()
    for _ in range(3):  # past Regenerate and Copy
        page.keys(Keys.SHIFT + Keys.TAB)
    assert "Arrow keys walk" in page.run("document.activeElement.getAttribute('aria-label')")
    page.keys(Keys.ARROW_DOWN, Keys.NULL)
    page.keys(Keys.ARROW_DOWN)
    assert page.run("document.activeElement.textContent") == " word"
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert page.one("#card").is_displayed()
    assert page.run("document.activeElement.getAttribute('aria-describedby')") == "card"
    page.keys(Keys.END)
    assert page.text("#card [data-field=origin]").startswith("bonus")
    page.keys(Keys.ESCAPE)
    assert not page.one("#card").is_displayed()
    page.one("#strip").send_keys(Keys.END, Keys.ARROW_LEFT)
    assert page.text("#strip-caption").startswith("Round 2:")


@pytest.mark.parametrize("sign", ["α", "τ"])
def test_signs_are_explained_where_they_stand(page: Page, sign: str) -> None:
    page.ask("word")
    help_ = f".help:has([aria-label='What {sign} means'])"
    assert not page.one(f"{help_} p").is_displayed()
    page.focus(page.one(f"{help_} summary"))
    page.keys(Keys.ENTER)
    assert page.one(f"{help_} p").text.startswith(f"{sign} is ")
    page.keys(Keys.ESCAPE)
    assert not page.one(f"{help_} p").is_displayed()


def is_dark(page: Page) -> bool:
    ground = page.run("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", ground)[:3])) < 3 * 60


def test_light_and_dark(page: Page) -> None:
    """As the system has it, until the switch says otherwise."""
    for dark in (False, True):
        page.look(dark=dark)
        assert is_dark(page) == dark
    page.one("#theme").click()
    assert (is_dark(page), page.one("#theme").get_attribute("aria-label")) == (False, "Colour scheme: light")
    page.look()
    page.one("#theme").click()
    assert is_dark(page)
    page.load()
    assert is_dark(page)
    page.one("#theme").click()
    assert not is_dark(page)


@pytest.fixture
def phone(page: Page) -> Page:
    page.look(width=390, height=844)
    page.load()
    return page


def rect(page: Page, css: str) -> dict[str, float]:
    return page.run("document.querySelector(arguments[0]).getBoundingClientRect().toJSON()", css)


def test_phone(phone: Page) -> None:
    assert rect(phone, "#composer")["bottom"] >= 844 - 20
    phone.click("#mode-race")
    phone.ask("unbreakable" * 20)
    wide, room = phone.run("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= room <= 390
    phone.view("tokens")
    assert phone.one("#legend").is_displayed()
    assert not phone.one("#legend li").is_displayed()  # folded
    phone.focus(phone.all(".tokens .token")[-1])
    assert phone.one("#card").is_displayed()
    card, composer = rect(phone, "#card"), rect(phone, "#composer")
    assert 0 <= card["left"] <= card["right"] <= 390
    assert card["bottom"] <= composer["top"]


@pytest.mark.parametrize(("drawer", "opener"), [("#sidebar", "#open-sidebar"), ("#panel", "#open-panel")])
def test_drawers_on_a_phone(phone: Page, drawer: str, opener: str) -> None:
    assert not phone.one(drawer).is_displayed()
    assert phone.one(opener).get_attribute("aria-expanded") == "false"
    phone.one(opener).click()
    assert phone.one(drawer).is_displayed()
    assert phone.run(f"document.querySelector('{drawer}').contains(document.activeElement)")
    assert phone.run("document.querySelector('main').inert")
    phone.keys(Keys.ESCAPE)
    assert not phone.one(drawer).is_displayed()
    assert phone.run(f"document.activeElement === document.querySelector('{opener}')")
    assert not phone.run("document.querySelector('main').inert")


def test_screen_readers(page: Page) -> None:
    """Answers are announced by the sentence; every control has a name; tabs move with the arrow keys."""
    page.ask("word")
    assert [line.get_property("textContent") for line in page.all("#announcer p")] == [TEXT]
    assert page.one("#log").get_attribute("aria-live") == "off"  # or each token would be read
    nameless = """[...document.querySelectorAll('button, summary, input:not([type=hidden]), select, textarea')]
        .filter((each) => !(each.getAttribute('aria-label') || each.textContent.trim() || each.labels?.length))
        .map((each) => each.outerHTML)"""
    assert page.run(nameless) == []
    page.focus(page.one("#tab-answer"))
    page.keys(Keys.ARROW_RIGHT)
    assert page.run("document.activeElement.id") == "tab-settings"
    assert page.one("#pane-settings").is_displayed()
    assert not page.one("#pane-answer").is_displayed()


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """axe-core's source, fetched and never kept."""
    npm, folder = shutil.which("npm"), tmp_path_factory.mktemp("axe")
    if npm is None:
        pytest.skip("no npm: the accessibility check fetches axe-core with it")
    try:
        subprocess.run([npm, "pack", AXE, "--silent"], cwd=folder, check=True, capture_output=True, timeout=60)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip(f"{AXE} cannot be fetched from here")
    shutil.unpack_archive(next(folder.glob("*.tgz")), folder)
    return (folder / "package" / "axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_accessibility(page: Page, axe: str, width: int, dark: bool) -> None:
    page.look(width=width, dark=dark)
    page.ask("word")
    page.ask("busy")
    page.ask("markdown")
    page.click("#mode-race")
    page.ask("word")
    page.view("tokens")
    page.view("text") if width < 600 else page.click("#tab-settings")
    page.focus(page.one("#prompt"))
    page.driver.execute_script(axe)
    found: dict[str, Any] = page.driver.execute_async_script("axe.run().then(arguments[0])")
    assert len(found["passes"]) > 20
    assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found["violations"]] == []
