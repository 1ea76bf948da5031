"""The page in a browser: conversations, what goes wrong in them, and what is kept of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from page_driver import Page
from scripted_api import TEXT, Scripted
from selenium.webdriver.common.keys import Keys


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


def dot(page: Page) -> str:
    """What the mark beside the server's state shows."""
    shown = page.run("getComputedStyle(document.querySelector('#server .dot')).backgroundColor")
    colours = {"--accepted": "green", "--error": "red"}
    for name, word in colours.items():
        page.run(f"document.body.style.setProperty('outline-color', 'var({name})')")
        if shown == page.run("getComputedStyle(document.body).outlineColor"):
            return word
    return "hollow" if shown == "rgba(0, 0, 0, 0)" else shown


def test_the_server_s_mark_is_green_only_once_it_has_answered(
    page: Page, server: Scripted, altered: Callable[[str], None]
) -> None:
    assert (page.text("#fact-server"), dot(page)) == ("ready", "green")
    server.key = "open-sesame"
    page.load()
    assert dot(page) == "red"
    altered("window.fetch = () => new Promise(() => {})")
    page.driver.get(page.address)
    page.wait(lambda: page.one(".example").is_displayed())
    assert (page.text("#fact-server"), dot(page)) == ("connecting", "hollow")


def test_a_server_that_is_loading_is_waited_for(page: Page, server: Scripted) -> None:
    server.loading = True
    page.load()
    page.wait(lambda: "not ready" in page.text("#fact-server"))
    assert dot(page) == "hollow"
    server.loading = False
    page.wait(lambda: page.text("#fact-server") == "ready")
    assert dot(page) == "green"
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
