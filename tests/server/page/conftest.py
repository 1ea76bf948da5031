"""A browser, and the page in it before a server with scripted answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from page_driver import Page, open_browser
from scripted_api import Scripted
from selenium.webdriver import Chrome


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    chrome = open_browser(tmp_path_factory.mktemp("profile"))
    yield chrome
    chrome.quit()


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    server = Scripted()
    yield server
    server.gone.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def server(scripted: Scripted) -> Scripted:
    scripted.reset()
    return scripted


@pytest.fixture
def page(driver: Chrome, server: Scripted) -> Page:
    return Page(driver, server.address)


@pytest.fixture
def altered(driver: Chrome) -> Iterator[Callable[[str], None]]:
    """altered(script): runs a script before the page's own, from the next load to the test's end."""
    added: list[str] = []

    def call(script: str) -> None:
        done = driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})
        added.append(done["identifier"])

    yield call
    for identifier in added:
        driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", {"identifier": identifier})
