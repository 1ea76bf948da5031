"""The page in a real browser against scripted answers: what it shows, refuses, and never does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_driver import Page, open_browser
from scripted_api import HOSTILE, PAGE, Scripted
from selenium.webdriver import Chrome
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

SOURCES = {path.name: path.read_text(encoding="utf-8") for path in Path(str(PAGE)).iterdir()}
AXE = "axe-core@4.14.0"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    chrome = open_browser(tmp_path_factory.mktemp("profile"))
    yield chrome
    chrome.quit()


@pytest.fixture
def server() -> Iterator[Scripted]:
    scripted = Scripted()
    yield scripted
    scripted.gone.set()
    scripted.shutdown()
    scripted.server_close()


@pytest.fixture
def page(driver: Chrome, server: Scripted) -> Page:
    return Page(driver, server.address)


def test_modules_in_node() -> None:
    """The modules that need no document, by their own tests."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node: the page's module tests need it")
    tests = sorted((Path(__file__).parent / "page").glob("*.test.mjs"))
    env = {**os.environ, "PAGE": str(PAGE)}
    done = subprocess.run([node, "--test", *map(str, tests)], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# fail 0" in done.stdout


def test_small_and_self_contained() -> None:
    assert sum(len(text.encode()) for text in SOURCES.values()) <= 150_000
    html = SOURCES["index.html"]
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", html)
    assert re.findall(r"<script[^>]*>", html) == ['<script type="module" src="/page/app.js">']
    for name, text in SOURCES.items():
        addresses = set(re.findall(r"https?://[^\s\"')]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name  # a namespace, never fetched
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text), (
            name
        )


def contrast(one: str, other: str) -> float:
    """WCAG's contrast of two colours written #rrggbb."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_contrast(scheme: int) -> None:
    block = re.findall(r":root \{(.*?)\}", SOURCES["theme.css"], re.S)[scheme]
    colour = dict(re.findall(r"--([\w-]+): (#\w{6});", block))
    grounds = ["ground", "panel", "accepted-ground", "recovered-ground", "bonus-ground"]
    pairs = [("ink", ground) for ground in grounds]
    pairs += [("muted", "ground"), ("muted", "panel"), ("on-accent", "accent")]
    pairs += [("error", "error-ground"), ("error", "ground"), ("error", "panel")]
    low = {pair: contrast(colour[pair[0]], colour[pair[1]]) for pair in pairs}
    assert {pair: ratio for pair, ratio in low.items() if ratio < 4.5} == {}
    marks = [("accepted", "accepted-ground"), ("recovered", "recovered-ground"), ("bonus", "bonus-ground")]
    marks += [("focus", "ground"), ("focus", "panel"), ("field", "panel"), ("field", "ground")]
    faint = {pair: contrast(colour[pair[0]], colour[pair[1]]) for pair in marks}
    assert {pair: ratio for pair, ratio in faint.items() if ratio < 3} == {}  # WCAG 1.4.11: marks and outlines


def test_tokens_figures_and_strip(page: Page) -> None:
    page.ask("word")
    assert page.text(".tokens") == "one word word word four five."
    classes = [span.get_attribute("class") for span in page.all(".tokens .token")]
    accepted = ["token accepted"] * 3
    assert classes == ["token plain", *accepted, "token recovered", "token accepted", "token bonus"]
    assert page.text("#figure-alpha") == "0.80"  # 4 accepted, 1 rejected
    assert page.text("#figure-tau") == "2.33"  # 7 tokens in 3 passes
    assert (page.text("#figure-accepted"), page.text("#figure-drafted")) == ("4", "6")
    columns = [len(page.all(f"#strip g:nth-child({i}) .kept")) for i in (1, 2, 3)]
    refused = [len(page.all(f"#strip g:nth-child({i}) .refused")) for i in (1, 2, 3)]
    assert (columns, refused) == ([0, 3, 1], [0, 2, 0])
    assert page.console() == []


def test_origins_differ_in_more_than_colour(page: Page) -> None:
    page.ask("word")
    lines = {
        kind: page.run(f"getComputedStyle(document.querySelector('.tokens .{kind}')).borderBottomStyle")
        for kind in ("accepted", "recovered", "bonus")
    }
    assert lines == {"accepted": "solid", "recovered": "dashed", "bonus": "double"}
    clear = "getComputedStyle(document.querySelector('.tokens .plain')).borderBottomColor"
    assert page.run(clear) == "rgba(0, 0, 0, 0)"


def test_hover_tells_provenance(page: Page) -> None:
    page.ask("word")
    ActionChains(page.driver).move_to_element(page.all(".tokens .token")[2]).perform()
    page.wait(lambda: page.one("#card").is_displayed())
    said = {name: page.text(f"#card [data-field={name}]") for name in ("token", "drafter", "round", "position")}
    assert said == {"token": '" word"', "drafter": "suffix", "round": "1", "position": "1"}
    assert page.text("#card [data-field=target]") == "0.7500"
    assert page.text("#card [data-field=draft]") == "0.5000"
    assert len(page.all(".tokens .same-round")) == 4  # the whole round
    assert "Round 1: 5 drafted by suffix, 3 accepted, then recovered" in page.text("#strip-caption")


def test_a_probability_that_is_not_known_is_not_shown(page: Page) -> None:
    page.ask("word")
    for token, shown in ((2, ["target", "draft"]), (0, ["target"]), (5, [])):
        page.driver.execute_script("arguments[0].focus()", page.all(".tokens .token")[token])
        fields = [name for name in ("target", "draft") if page.one(f"#card [data-field={name}]").is_displayed()]
        assert fields == shown


def test_keyboard_only(page: Page) -> None:
    """From the prompt to the answer's tokens and the strip, with keys alone."""
    page.run("document.body.focus()")
    page.keys(Keys.TAB)
    assert page.run("document.activeElement.textContent") == "Skip to the prompt"
    page.keys(Keys.ENTER)
    page.keys("word", Keys.ENTER)
    page.idle()
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
    assert page.text("#strip-caption").startswith("Round 1:")


def test_hostile_text_is_only_text(page: Page) -> None:
    page.ask("hostile")
    assert page.text(".tokens") == "".join(HOSTILE)
    assert page.all(".tokens img, .tokens script") == []
    assert page.driver.title == "Outrider"
    assert page.console() == []


def test_side_by_side(page: Page, server: Scripted) -> None:
    """Same prompt and seed, one after the other, with caches of their own; both clocks and a verdict."""
    page.choose("#mode-compare")
    page.set("temperature", "0.7")
    page.ask("word")
    plain, speculative = server.asked
    assert (plain["speculation"], speculative["speculation"]) == ({"off": True}, {"off": False})
    assert plain.pop("cache_salt") != speculative.pop("cache_salt")
    assert {**plain, "speculation": 0} == {**speculative, "speculation": 0}
    assert plain["temperature"] == 0.7
    assert [span.text for span in page.all(".side-title")] == ["Plain", "Speculative"]
    assert all(re.fullmatch(r"\d+\.\d\d s", clock.text) for clock in page.all(".clock"))
    assert page.text(".verdict").startswith("The same text, character for character.")
    page.choose("#together")
    page.ask("endless", ends=False)
    page.wait(lambda: len(server.asked) == 4)  # the second did not wait for the first
    page.one("#stop").click()
    page.idle()
    assert page.console() == []


def test_stop_cancels_on_the_server(page: Page, server: Scripted) -> None:
    page.ask("endless", ends=False)
    page.wait(lambda: len(page.all(".tokens .token")) > 3)
    page.one("#stop").click()
    page.idle()
    assert server.gone.wait(20)
    assert "stopped by you" in page.text(".foot")
    assert page.all(".error") == []


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("busy", "queue is full. It says: scripted to be busy. Try again in 3 s."),
        ("loading", "not ready"),
        ("large", "too large"),
        ("break", "The answer broke off: the engine has failed."),
    ],
)
def test_errors_in_words(page: Page, prompt: str, words: str) -> None:
    page.ask(prompt)
    error = page.one(".exchange .error")
    assert words in error.text
    assert error.get_attribute("role") == "alert"
    assert page.one("#prompt").get_property("value") == prompt  # to be sent again


def test_key_is_asked_for_and_kept_in_the_tab(page: Page, server: Scripted) -> None:
    server.key = "open-sesame"
    page.driver.refresh()
    page.wait(lambda: "API key" in page.text("#fact-server"))
    assert page.run("document.activeElement.name") == "key"
    page.keys("open-sesame", Keys.TAB)
    page.wait(lambda: page.text("#fact-server") == "ready")
    page.ask("word")
    assert page.text(".tokens") == "one word word word four five."
    assert page.run("localStorage.length") == 0
    assert page.run("document.cookie") == ""


def test_a_server_that_is_loading_is_waited_for(page: Page, server: Scripted) -> None:
    server.loading = True
    page.driver.refresh()
    page.wait(lambda: "not ready" in page.text("#fact-server"))
    server.loading = False
    page.wait(lambda: page.text("#fact-server") == "ready")
    assert (page.text("#fact-model"), page.text("#fact-drafter")) == ("scripted", "suffix")


def test_conversation_is_remembered_until_new(page: Page, server: Scripted) -> None:
    page.set("system", "Be brief.")
    page.ask("first")
    page.ask("second")
    said = [message["content"] for message in server.asked[1]["messages"]]
    assert said == ["Be brief.", "first", "one first first first four five.", "second"]
    assert server.asked[1]["messages"][2]["role"] == "assistant"
    page.ask("endless", ends=False)
    page.wait(lambda: len(page.all(".exchange:last-child .token")) > 3)
    page.one("#clear").click()  # in the midst of an answer, which is forgotten too
    page.idle()
    page.ask("third")
    assert [message["content"] for message in server.asked[3]["messages"]] == ["Be brief.", "third"]


def test_settings_out_of_range_are_not_sent(page: Page, server: Scripted) -> None:
    page.set("top_p", "1.5")
    page.ask("word")
    assert server.asked == []
    assert page.run("document.activeElement.name") == "top_p"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_narrow_window(page: Page, dark: bool) -> None:
    page.look(width=360, height=740, dark=dark)
    page.set("seed", "7")
    page.choose("#mode-compare")
    page.ask("unbreakable" * 20)
    wide, room = page.run("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= room <= 360
    ground = page.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 3 * 60) == dark
    page.driver.execute_script("arguments[0].focus()", page.all(".tokens .token")[-1])
    card = page.run("document.getElementById('card').getBoundingClientRect().toJSON()")
    assert card["left"] >= 0
    assert card["right"] <= 360


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


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (360, False)])
def test_accessibility(page: Page, axe: str, width: int, dark: bool) -> None:
    page.look(width=width, dark=dark)
    page.ask("word")
    page.ask("busy")
    page.choose("#mode-compare")
    page.ask("word")
    page.run("(document.getElementById('settings-panel').open = true)")
    page.driver.execute_script("arguments[0].focus()", page.all(".tokens .token")[2])
    page.driver.execute_script(axe)
    found: dict[str, Any] = page.driver.execute_async_script("axe.run().then(arguments[0])")
    assert len(found["passes"]) > 20
    assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found["violations"]] == []
