"""A real headless Chromium, driven the way the page's tests need it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


def open_browser(profile: Path) -> Chrome:
    """A Chromium with a fresh profile; skips the test where there is none."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no browser: the page's tests need chromium and chromedriver (Debian: chromium chromium-driver)")
    options = ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={profile}", "--window-size=1280,860"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return Chrome(options=options, service=Service(driver))


class Page:
    """The page in a browser, by what people do with it."""

    def __init__(self, driver: Chrome, address: str) -> None:
        self.driver = driver
        self.address = address
        self.look()
        driver.get(f"{address}/page/icon.svg")  # the page's own origin, without its scripts
        driver.execute_script("sessionStorage.clear(); localStorage.clear()")
        self.console()  # what an earlier test left
        self.load()

    def load(self) -> None:
        """Opens the page, or opens it again, and waits until it has heard of the server."""
        self.driver.get(self.address)
        self.wait(lambda: self.text("#fact-server") not in ("", "connecting"))

    def look(self, *, width: int = 1280, height: int = 860, dark: bool = False) -> None:
        """A window of this size, for a person with this taste."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        calm = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, calm]})
        self.driver.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})  # no window has the focus

    def one(self, css: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def run(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(f"return {script}", *args)

    def text(self, css: str) -> str:
        """The text of an element as the document holds it, spaces and all."""
        return self.one(css).get_property("textContent")  # pyright: ignore[reportReturnType]

    def wait(self, condition: Callable[[], Any], seconds: float = 60) -> Any:
        return WebDriverWait(self.driver, seconds, poll_frequency=0.05).until(lambda _: condition())

    def keys(self, *keys: str) -> None:
        """Types where the focus is."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def ask(self, prompt: str, *, ends: bool = True) -> None:
        """Sends a prompt and, unless told otherwise, waits until the page is idle again."""
        box = self.one("#prompt")
        box.clear()
        box.send_keys(prompt.replace("\n", Keys.SHIFT + Keys.ENTER + Keys.SHIFT), Keys.ENTER)
        if ends:
            self.idle()

    def idle(self) -> None:
        self.wait(lambda: not self.one("#send").get_property("hidden"))

    def click(self, css: str) -> None:
        """Clicks an element wherever it lies, by the page's own event."""
        self.driver.execute_script("arguments[0].click()", self.one(css))

    def focus(self, element: WebElement) -> None:
        self.driver.execute_script("arguments[0].focus()", element)

    def view(self, name: str) -> None:
        """Shows answers as "text" or as "tokens"."""
        self.click(f"#view-{name}")

    def set(self, name: str, value: str) -> None:
        """Fills in a setting."""
        if not self.one("#panel").is_displayed():
            self.click("#open-panel")
        self.click("#tab-settings")
        field = self.one(f"#settings [name={name}]")
        if field.tag_name != "select":
            field.clear()
        field.send_keys(value, Keys.TAB)

    def console(self) -> list[str]:
        """What the console said since it was last asked, warnings and errors only."""
        return [each["message"] for each in self.driver.get_log("browser") if each["level"] in ("SEVERE", "WARNING")]


def answered(page: Page, prompt: str = "word") -> Page:
    """An answer as tokens."""
    page.view("tokens")
    page.ask(prompt)
    return page
