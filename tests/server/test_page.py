"""The page in a real browser against scripted answers: what it shows, refuses, and never does."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from page_driver import Page, open_browser
from scripted_api import HOSTILE, LONG, MARKDOWN, PAGE, Scripted
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


def test_modules_in_node() -> None:
    """The modules that need no document, by their own tests."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node: the page's module tests need it")
    tests = sorted((Path(__file__).parent / "page").glob("*.test.mjs"))
    env = {**os.environ, "PAGE": str(PAGE)}
    load = "; ".join(f"await import({json.dumps(test.as_uri())})" for test in tests)  # one process for all
    command = [node, "--test-reporter=tap", "--input-type=module", "--eval", load]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# fail 0" in done.stdout


def test_small_and_self_contained() -> None:
    assert sum(len(text.encode()) for text in SOURCES.values()) <= 250_000
    html = SOURCES["index.html"]
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", html)
    scripts = ['<script src="/page/theme.js">', '<script type="module" src="/page/app.js">']
    assert re.findall(r"<script[^>]*>", html) == scripts
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
    pairs_of = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", SOURCES["theme.css"])
    colour = {name: values[scheme] for name, *values in pairs_of}
    grounds = ["ground", "panel", "raised", "chosen", "accepted-ground", "recovered-ground", "bonus-ground"]
    pairs = [("ink", ground) for ground in grounds]
    pairs += [("muted", "ground"), ("muted", "panel"), ("muted", "raised"), ("on-accent", "accent")]
    pairs += [("accent", "ground"), ("accent", "panel")]
    pairs += [("error", "error-ground"), ("error", "ground"), ("error", "panel")]
    low = {pair: contrast(colour[pair[0]], colour[pair[1]]) for pair in pairs}
    assert {pair: ratio for pair, ratio in low.items() if ratio < 4.5} == {}
    marks = [("accepted", "accepted-ground"), ("recovered", "recovered-ground"), ("bonus", "bonus-ground")]
    marks += [("focus", "ground"), ("focus", "panel"), ("field", "panel"), ("field", "ground")]
    faint = {pair: contrast(colour[pair[0]], colour[pair[1]]) for pair in marks}
    assert {pair: ratio for pair, ratio in faint.items() if ratio < 3} == {}  # WCAG 1.4.11: marks and outlines


TEXT = "one word word word four five."


def answered(page: Page, prompt: str = "word") -> Page:
    """An answer as tokens."""
    page.view("tokens")
    page.ask(prompt)
    return page


def test_first_screen(page: Page, server: Scripted) -> None:
    assert page.run("document.activeElement.id") == "prompt"
    examples = page.all(".example")
    assert 4 <= len(examples) <= 6
    examples[0].click()
    assert "def add_tax(x, rate):" in str(page.one("#prompt").get_property("value"))
    assert page.run("document.activeElement.id") == "prompt"
    assert server.asked == []  # to be read and changed first
    page.keys(Keys.ENTER)
    page.idle()
    assert not page.one("#welcome").is_displayed()
    page.one("#new").click()
    assert page.one("#welcome").is_displayed()


def test_tokens_figures_and_strip(page: Page) -> None:
    answered(page)
    assert page.text(".tokens") == TEXT
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


def test_an_answer_is_headed_by_the_model_and_ends_with_what_speculation_did(page: Page) -> None:
    page.ask("word")
    assert page.text(".answer .model") == "scripted"
    assert page.text(".answer .summary") == "7 tokens in 3 passes · 2.3 tokens per pass"
    assert re.fullmatch(
        r"[\d.]+ tok/s · first token after \d+ ms · \d+\.\d\d s · seed \d+", page.text(".answer .detail")
    )


def test_why_speculation_did_not_help(page: Page, server: Scripted) -> None:
    page.ask("undrafted")
    page.ask("rejected")
    page.set("drafter", "none")
    page.ask("word")
    assert server.asked[-1]["speculation"] == {"off": True}
    assert [line.text for line in page.all(".answer .summary")] == [
        "3 tokens in 3 passes · nothing was drafted: no repeated text worth drafting",
        "5 tokens in 5 passes · drafts were rejected: 0 of 40 accepted",
        "7 tokens in 7 passes · drafting is off",
    ]
    assert page.all(".answer .detail")[1].text.endswith("cut at max tokens")


def test_markdown(page: Page) -> None:
    page.ask("markdown")
    texts = {
        css: [each.text for each in page.all(f".markdown {css}")] for css in ("h4", "strong", "em", "li", "th", "td")
    }
    assert texts == {
        "h4": ["Title"],
        "strong": ["bold"],
        "em": ["italic"],
        "li": ["one", "two\nnested", "nested"],
        "th": ["a", "b"],
        "td": ["1", "2"],
    }
    assert page.text(".markdown p code") == "code"
    assert page.text(".markdown blockquote") == "quoted\ntext"
    assert page.text(".markdown pre") == "def f(x):\n    return x"
    assert page.text(".code-head span") == "python"
    assert page.run("getComputedStyle(document.querySelectorAll('.markdown td')[1]).textAlign") == "end"
    links = [[link.get_attribute(name) for name in ("href", "rel", "target")] for link in page.all(".markdown a")]
    assert links == [[f"https://example.org/{name}", "noopener noreferrer", "_blank"] for name in ("a", "i.png")]
    assert page.all(".markdown img, .markdown script") == []
    assert "<img src=x onerror=" in page.text(".markdown > p:last-child")
    assert page.driver.title == "Outrider"
    assert page.console() == []


def test_copying(page: Page, server: Scripted) -> None:
    allowed = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"], "origin": server.address}
    page.driver.execute_cdp_cmd("Browser.grantPermissions", allowed)
    page.ask("markdown")
    for button, text in ((".code-head button", "def f(x):\n    return x"), (".answer > .actions button", MARKDOWN)):
        page.click(button)
        page.wait(lambda button=button: page.text(button) == "Copied")
        assert page.driver.execute_async_script("navigator.clipboard.readText().then(arguments[0])") == text


def test_copying_without_a_clipboard_of_the_browser_s(page: Page, altered: Callable[[str], None]) -> None:
    """Over plain HTTP from another machine there is none."""
    altered("Object.defineProperty(Navigator.prototype, 'clipboard', { value: undefined })")
    page.load()
    page.ask("word")
    page.click(".answer > .actions button")
    page.wait(lambda: page.text(".answer > .actions button") == "Copied")


def test_what_is_written_stays_as_it_is_while_more_comes(page: Page, server: Scripted) -> None:
    page.ask("long", ends=False)
    page.wait(lambda: len(page.all(".markdown > p")) > 200)
    assert page.run("window.first = document.querySelector('.markdown > p')") is not None
    server.gate.set()
    page.idle()
    assert page.run("window.first === document.querySelector('.markdown > p')")
    kinds = page.run("[...document.querySelector('.markdown').children].map((each) => each.localName)")
    assert kinds == ["p"] * 361 + ["div", "ul"]
    assert page.text(".markdown pre") == "code = code\n" * 399 + "code = code"
    assert len(page.all(".markdown li")) == 450
    page.view("tokens")
    assert page.text(".tokens") == LONG
    assert len(page.all(".tokens .token")) >= 4000


def test_the_log_follows_until_it_is_scrolled(page: Page, server: Scripted) -> None:
    left = "(({ scrollHeight, scrollTop, clientHeight }) => scrollHeight - scrollTop - clientHeight)"
    server.gate.set()
    page.ask("long")
    assert page.run(f"{left}(document.getElementById('log'))") < 2
    page.run("document.getElementById('log').scrollTop = 0")
    page.wait(lambda: page.one("#to-end").is_displayed())
    page.one("#to-end").click()
    page.wait(lambda: not page.one("#to-end").is_displayed())
    assert page.run(f"{left}(document.getElementById('log'))") < 2


def test_a_long_prompt_is_folded_and_an_answer_clicked_shows_its_figures(page: Page) -> None:
    page.ask("word " * 120)
    page.ask("undrafted")
    fold = page.one(".question button")
    folded = page.one(".said").rect["height"]
    page.driver.execute_script("arguments[0].click()", fold)
    assert (fold.text, fold.get_attribute("aria-expanded")) == ("Show less", "true")
    assert page.one(".said").rect["height"] > folded
    assert page.text("#figure-tokens") == "3"
    page.click(".exchange:first-of-type .answer")
    assert page.text("#figure-tokens") == "7"


def test_origins_differ_in_more_than_colour(page: Page) -> None:
    answered(page)
    lines = {
        kind: page.run(f"getComputedStyle(document.querySelector('.tokens .{kind}')).borderBottomStyle")
        for kind in ("accepted", "recovered", "bonus")
    }
    assert lines == {"accepted": "solid", "recovered": "dashed", "bonus": "double"}
    clear = "getComputedStyle(document.querySelector('.tokens .plain')).borderBottomColor"
    assert page.run(clear) == "rgba(0, 0, 0, 0)"


def test_hover_tells_provenance(page: Page) -> None:
    answered(page)
    ActionChains(page.driver).move_to_element(page.all(".tokens .token")[2]).perform()
    page.wait(lambda: page.one("#card").is_displayed())
    said = {name: page.text(f"#card [data-field={name}]") for name in ("token", "drafter", "round", "position")}
    assert said == {"token": '" word"', "drafter": "suffix", "round": "2", "position": "2"}  # counted from 1
    assert page.text("#card [data-field=target]") == "0.7500"
    assert page.text("#card [data-field=draft]") == "0.5000"
    assert len(page.all(".tokens .same-round")) == 4  # the whole round
    assert "Round 2: 5 drafted by suffix, 3 accepted, then recovered" in page.text("#strip-caption")


def test_a_card_shows_what_there_is(page: Page) -> None:
    """No probability that is not known, and nothing of a draft for a plain token."""
    answered(page)
    draft = ["drafter", "position"]
    for token, shown in ((2, [*draft, "target", "draft"]), (0, ["target"]), (5, draft)):
        page.focus(page.all(".tokens .token")[token])
        fields = [name for name in (*draft, "target", "draft") if page.one(f"#card [data-field={name}]").is_displayed()]
        assert fields == shown
        assert page.one("#card [data-field=round]").is_displayed()


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


def test_hostile_text_is_only_text(page: Page) -> None:
    page.ask("hostile")
    for view in ("text", "tokens"):
        page.view(view)
        assert page.text(".body") == "".join(HOSTILE)
        assert page.all(".answer img, .answer script") == []
    assert page.driver.title == "Outrider"
    assert page.console() == []


def test_race(page: Page, server: Scripted) -> None:
    """The same prompt and seed, one after the other, with caches of their own; two lanes and a verdict."""
    page.click("#mode-race")
    page.set("temperature", "0.7")
    page.ask("word")
    plain, speculative = server.asked
    assert (plain["speculation"], speculative["speculation"]) == ({"off": True}, {"off": False})
    assert plain.pop("cache_salt") != speculative.pop("cache_salt")
    assert {**plain, "speculation": 0} == {**speculative, "speculation": 0}
    assert plain["temperature"] == 0.7
    assert [name.text.lower() for name in page.all(".lane-name")] == ["plain", "speculative"]
    assert all(re.fullmatch(r"[\d.]+ tok/s · \d+\.\d\d s", lane.text) for lane in page.all(".lane-figures"))
    assert page.all(".track")[1].get_attribute("aria-valuenow") == "100"
    assert page.text(".banner .chip") == "identical"
    assert re.fullmatch(r"(Speculative|Plain) wins: \d+\.\d\d\s×|A draw", page.text(".banner strong"))
    assert "The same text, character for character." in page.text(".banner p")
    lines = [line.text for line in page.all(".answer .summary")]
    assert lines[0] == "7 tokens in 7 passes · drafting is off"
    assert re.fullmatch(r"7 tokens in 3 passes · \d+\.\d\d\s× · identical", lines[1])
    page.click("#together")
    page.ask("endless", ends=False)
    page.wait(lambda: len(server.asked) == 4)  # the second did not wait for the first
    page.wait(lambda: all(float(str(each.get_attribute("aria-valuenow"))) > 0 for each in page.all(".track")[2:]))
    page.one("#stop").click()
    page.idle()
    assert len(page.all(".banner strong")) == 1  # no verdict on half a race
    assert page.console() == []


def test_a_race_whose_texts_differ_has_no_winner(page: Page) -> None:
    page.click("#mode-race")
    page.ask("differ")
    assert page.text(".banner strong") == "The texts differ"
    assert page.text(".banner .chip") == "not identical"
    assert page.text(".banner p").startswith("From token 2 on.")
    assert page.all(".lane.won") == []
    assert "differs from token 2 on" in page.text(".answer:last-child .summary")


def test_stop_cancels_on_the_server(page: Page, server: Scripted) -> None:
    page.ask("endless", ends=False)
    page.wait(lambda: len(page.text(".markdown")) > 10)
    page.one("#stop").click()
    page.idle()
    assert server.gone.wait(20)
    assert "stopped by you" in page.text(".detail")
    assert page.all(".error") == []


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("busy", "queue is full. It says: scripted to be busy. Try again in 3 s."),
        ("loading", "not ready"),
        ("large", "too large"),
    ],
)
def test_errors_in_words(page: Page, prompt: str, words: str) -> None:
    page.ask(prompt)
    error = page.one(".exchange .error")
    assert words in error.text
    assert error.get_attribute("role") == "alert"
    assert page.one("#prompt").get_property("value") == prompt  # to be sent again
    page.ask("word")
    assert page.all(".exchange .error") == []


def test_an_answer_that_breaks_off_is_kept_and_can_be_written_again(page: Page, server: Scripted) -> None:
    page.ask("break")
    page.load()
    page.one(".conversations .open").click()
    assert page.text(".markdown") == "half"
    error = page.one(".exchange .error")
    assert error.text == "The answer broke off: the engine has failed."
    assert error.get_attribute("role") == "alert"
    page.one(".answer .again").click()
    page.wait(lambda: len(server.asked) == 2)
    page.idle()
    assert server.asked[0]["messages"] == server.asked[1]["messages"]
    assert len(page.all(".exchange")) == 1


def test_key_is_asked_for_and_kept_in_the_tab(page: Page, server: Scripted) -> None:
    server.key = "open-sesame"
    page.load()
    page.wait(lambda: "API key" in page.text("#fact-server"))
    assert page.run("document.activeElement.name") == "key"
    page.keys("open-sesame", Keys.TAB)
    page.wait(lambda: page.text("#fact-server") == "ready")
    page.ask("word")
    assert page.text(".markdown") == TEXT
    assert "open-sesame" not in page.run("JSON.stringify(localStorage)")
    assert page.run("document.cookie") == ""


def test_a_server_that_is_loading_is_waited_for(page: Page, server: Scripted) -> None:
    server.loading = True
    page.load()
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
    page.wait(lambda: len(page.text(".exchange:last-child .markdown")) > 10)
    page.one("#new").click()  # in the midst of an answer
    page.idle()
    page.ask("third")
    assert [message["content"] for message in server.asked[3]["messages"]] == ["Be brief.", "third"]
    assert [each.text for each in page.all(".conversations .open")] == ["third", "first"]


def test_conversations_outlive_the_tab(page: Page, server: Scripted) -> None:
    page.ask("first")
    page.click("#mode-race")
    page.ask("word")
    summaries = [line.text for line in page.all(".summary")]
    page.load()
    assert page.all(".exchange") == []
    page.one(".conversations .open").click()
    assert [said.text for said in page.all(".said")] == ["first", "word"]
    assert [line.text for line in page.all(".summary")] == summaries
    assert page.text(".banner .chip") == "identical"
    assert page.text(".markdown") == "one first first first four five."
    page.view("tokens")
    assert len(page.all(".exchange:first-of-type .token.accepted")) == 4
    page.ask("second")
    assert server.asked[-1]["messages"][0] == {"role": "user", "content": "first"}


def test_conversations_are_renamed_exported_and_deleted(page: Page, tmp_path: Path) -> None:
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.ask("first")

    def choose(label: str) -> None:
        page.one(".conversations summary").click()
        next(each for each in page.all(".menu-box button") if each.text == label).click()

    choose("Rename")
    page.keys(Keys.CONTROL + "a", Keys.NULL)
    page.keys("Two rivers", Keys.ENTER)
    assert page.text(".conversations .open") == "Two rivers"
    choose("Export as JSON")
    choose("Export as Markdown")
    kept, text = tmp_path / "two-rivers.json", tmp_path / "two-rivers.md"
    page.wait(lambda: kept.is_file() and text.is_file())
    conversation = json.loads(kept.read_text(encoding="utf-8"))
    assert conversation["turns"][0]["answers"][0]["run"]["text"] == "one first first first four five."
    written = text.read_text(encoding="utf-8")
    assert written.startswith("# Two rivers\n\n## You\n\nfirst\n\n## scripted\n\none first")
    page.ask("second")
    assert page.text(".conversations .open") == "Two rivers"  # a title of one's own stays
    choose("Delete")
    assert page.all(".conversations .open") == []
    assert page.all(".exchange") == []
    assert "one first" not in page.run("JSON.stringify(localStorage)")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("Storage.prototype.setItem = () => { throw new DOMException('', 'QuotaExceededError') }", "storage is full"),
        ("Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('') } })", "does not let"),
    ],
    ids=["full", "forbidden"],
)
def test_without_storage(page: Page, altered: Callable[[str], None], script: str, words: str) -> None:
    altered(script)
    page.load()
    page.ask("first")
    assert words in page.one("#storage-problem").text
    page.one("#new").click()
    page.ask("second")
    page.all(".conversations .open")[1].click()  # until the tab closes it is there
    assert page.text(".said") == "first"
    assert page.console() == []


def test_regenerate_edit_and_recall(page: Page, server: Scripted) -> None:
    page.ask("first")
    page.ask("second")
    assert [each.is_displayed() for each in page.all(".again")] == [False, True]  # the last answer alone
    page.all(".again")[1].click()
    page.wait(lambda: len(server.asked) == 3)
    page.idle()
    assert server.asked[2]["messages"] == server.asked[1]["messages"]
    assert len(page.all(".exchange")) == 2

    page.one(".exchange:first-of-type .question button").click()
    page.keys(Keys.CONTROL + "a", Keys.NULL)
    page.keys("other", Keys.ENTER)
    page.wait(lambda: len(server.asked) == 4)
    page.idle()
    assert [message["content"] for message in server.asked[3]["messages"]] == ["other"]
    assert [said.text for said in page.all(".said")] == ["other"]  # what followed is dropped
    page.load()
    page.one(".conversations .open").click()
    assert [said.text for said in page.all(".said")] == ["other"]

    page.one("#prompt").send_keys(Keys.ARROW_UP)
    assert page.one("#prompt").get_property("value") == "other"
    page.one("#prompt").send_keys(" word", Keys.ARROW_UP)
    assert page.one("#prompt").get_property("value") == "other word"  # only an empty box recalls


def test_editing_can_be_left(page: Page) -> None:
    page.ask("first")
    page.one(".question button").click()
    page.keys("x", Keys.ESCAPE)
    assert page.text(".said") == "first"
    assert page.run("document.activeElement.textContent") == "Edit"


def test_settings_are_sent_and_kept(page: Page, server: Scripted) -> None:
    page.ask("word")
    own = {"temperature", "max_completion_tokens", "seed"}  # the rest is the server's
    fixed = {"model", "messages", "speculation", "include_provenance", "stream", "stream_options"}
    assert set(server.asked[0]) == own | fixed
    wanted = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 7,
        "presence_penalty": 0.1, "frequency_penalty": -0.2, "repetition_penalty": 1.1,
    }  # fmt: skip
    for name, value in wanted.items():
        page.set(name, str(value))
    page.set("max_tokens", "99")
    page.set("draft_length", "4")
    page.set("stop", "END\nSTOP")
    page.load()
    page.ask("word")
    assert server.asked[1].items() >= wanted.items()
    assert server.asked[1]["max_completion_tokens"] == 99
    assert server.asked[1]["speculation"] == {"off": False, "max_tokens": 4}
    assert server.asked[1]["stop"] == ["END", "STOP"]
    page.set("key", "")
    page.click("#settings [type=reset]")
    page.ask("word")
    assert set(server.asked[2]) == own | fixed


@pytest.mark.parametrize(("name", "value"), [("top_p", "1.5"), ("draft_length", "16"), ("stop", "a\nb\nc\nd\ne")])
def test_settings_out_of_range_are_not_sent(page: Page, server: Scripted, name: str, value: str) -> None:
    page.set(name, value)
    page.click("#tab-answer")
    page.ask("word", ends=False)
    assert server.asked == []
    assert page.run("document.activeElement.name") == name
    assert page.one("#prompt").get_property("value") == "word"


def test_model_card(page: Page) -> None:
    page.click("#tab-server")
    card = dict(zip(*([each.text for each in page.all(f"#model-card {tag}")] for tag in ("dt", "dd")), strict=True))
    assert card == {
        "Name": "scripted",
        "Weights": "538 MB on disk",
        "Format": "int4",
        "Context": "8,192 tokens",
        "Device": "cpu",
        "Cache": "65,536 tokens",
        "Drafter": "suffix",
        "Draft length": "up to 15 tokens",
    }


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
