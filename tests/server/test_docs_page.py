"""/docs: the OpenAPI document in a real browser, from this server alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from page_driver import open_browser
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait
from server_world import Running

from outrider.server.web.page import PAGE_HEADERS, STATIC

FILES = ("docs.html", "docs.css", "docs.js")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    chrome = open_browser(tmp_path_factory.mktemp("profile"))
    yield chrome
    chrome.quit()


def texts(driver: Chrome, selector: str) -> list[str]:
    return [each.text for each in driver.find_elements(By.CSS_SELECTOR, selector)]


def loaded(driver: Chrome) -> bool:
    return texts(driver, "#status") == [""] and bool(texts(driver, "#routes h2"))


def opened(driver: Chrome, url: str, ready: Callable[[Chrome], Any]) -> None:
    driver.get(f"{url}/docs")
    driver.execute_script("sessionStorage.clear()")
    driver.get_log("browser")
    driver.get(f"{url}/docs")
    WebDriverWait(driver, 20).until(ready)


def test_it_is_served_under_the_page_s_own_policy(served: Running):
    for method in ("GET", "HEAD"):
        answer = served.http.request(method, "/docs")
        assert answer.status_code == 200
        assert answer.headers.items() >= PAGE_HEADERS.items()
    assert served.http.get("/docs").text == (STATIC / "docs.html").read_text()
    assert "/docs" not in served.http.get("/openapi.json").json()["paths"]


def test_it_is_small_and_asks_nobody_else():
    sources = {name: Path(STATIC / name).read_text() for name in FILES}
    assert len((sources["docs.html"] + sources["docs.js"]).splitlines()) <= 150
    assert not [name for name, text in sources.items() if re.search(r"https?:|//[a-z]", text)]


def test_every_route_and_schema_is_shown(served: Running, driver: Chrome):
    opened(driver, served.url, loaded)
    document = served.http.get("/openapi.json").json()
    routes = [f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods]
    assert texts(driver, "#routes h2") == routes
    assert texts(driver, "#schemas h2") == list(document["components"]["schemas"])
    fields = [name for each in document["components"]["schemas"].values() for name in each.get("properties", {})]
    assert texts(driver, "#schemas th") == fields
    shown = driver.find_element(By.TAG_NAME, "main").text
    assert "integer (≥ 1, ≤ " in shown  # a bounded number
    assert '"none" or "auto" or "required" or NamedToolChoice or AllowedToolsChoice or null' in shown
    assert "The output continues the text of the last message." in shown
    targets = [link.get_attribute("href") for link in driver.find_elements(By.CSS_SELECTOR, "article a")]
    ids = {each.get_attribute("id") for each in driver.find_elements(By.CSS_SELECTOR, "#schemas h2")}
    assert {str(target).partition("#")[2] for target in targets} <= ids
    asked = driver.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert all(address.startswith(served.url + "/") for address in asked)
    assert driver.get_log("browser") == []


def test_a_locked_server_shows_it_to_who_has_the_key(serve: Callable[..., Running], driver: Chrome):
    locked = serve(api_keys=("open-sesame",))
    opened(driver, locked.url, lambda driver: "needs an API key" in "".join(texts(driver, "#status")))
    assert texts(driver, "#routes h2") == []
    driver.find_element(By.ID, "key").send_keys("open-sesame")
    driver.find_element(By.CSS_SELECTOR, "#locked button").click()
    WebDriverWait(driver, 20).until(loaded)
    assert not driver.find_element(By.ID, "locked").is_displayed()
