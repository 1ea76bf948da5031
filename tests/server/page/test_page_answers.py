"""The page in a browser: what it shows of an answer, and of two side by side."""

from __future__ import annotations

import re
from collections.abc import Callable

from page_driver import Page, answered
from scripted_api import HOSTILE, LONG, MARKDOWN, TEXT, Scripted
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys


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
