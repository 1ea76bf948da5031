"""The page in a real browser against the real server: what it shows is what the API says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from page_driver import Page, open_browser
from selenium.webdriver import Chrome
from server_world import Running

PROMPT = "tell me a tale\nof é and a"
SEED = 11
TOKENS = 120


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    chrome = open_browser(tmp_path_factory.mktemp("profile"))
    yield chrome
    chrome.quit()


@pytest.fixture
def running(serve: Callable[..., Running]) -> Running:
    return serve(drafter="suffix")


@pytest.fixture
def page(driver: Chrome, running: Running) -> Page:
    page = Page(driver, running.url)
    for name, value in (("seed", SEED), ("temperature", 0.8), ("max_tokens", TOKENS)):
        page.set(name, str(value))
    page.view("tokens")
    return page


def answer_of(running: Running) -> str:
    """What the API itself says, asked plainly and with caches that nothing has warmed."""
    asked = {"messages": [{"role": "user", "content": PROMPT}], "seed": SEED, "temperature": 0.8}
    plain = {"cache_salt": "judge", "speculation": {"off": True}, "max_completion_tokens": TOKENS}
    return running.post("/v1/chat/completions", **asked, **plain).json()["choices"][0]["message"]["content"]


def counter(running: Running, name: str) -> float:
    found = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", running.http.get("/metrics").text, re.M)
    return sum(map(float, found))


def test_streamed_tokens_are_the_answer(page: Page, running: Running) -> None:
    page.ask(PROMPT)
    assert page.text(".said") == PROMPT
    assert page.text(".tokens") == answer_of(running)
    accepted = len(page.all(".tokens .token.accepted"))
    assert accepted == counter(running, "outrider_spec_accepted_tokens_total") > 5
    assert len(page.all(".tokens .token")) <= TOKENS
    assert page.text("#figure-accepted") == str(accepted)
    assert float(page.text("#figure-drafted")) == counter(running, "outrider_spec_draft_tokens_total")
    rejected = counter(running, "outrider_spec_refusals_total")
    assert page.text("#figure-alpha") == f"{accepted / (accepted + rejected):.2f}"
    assert len(page.all("#strip g")) == int(page.text("#figure-rounds"))
    assert len(page.all("#strip .kept")) == accepted
    assert (page.text("#fact-model"), page.text("#fact-drafter")) == ("toy", running.engine_thread.engine.facts.drafter)
    assert page.text(".summary").endswith(f"in {page.text('#figure-rounds')} passes · {speed(page)} tokens per pass")
    assert page.console() == []


def speed(page: Page) -> str:
    return f"{float(page.text('#figure-tokens')) / float(page.text('#figure-rounds')):.1f}"


def test_settings_are_ones_the_server_takes(page: Page) -> None:
    """Every field filled in: nothing is refused, nothing is ignored."""
    given = {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.1}
    for name, value in {**given, "frequency_penalty": 0.1, "draft_length": 3, "stop": "zzz", "system": "a"}.items():
        page.set(name, str(value))
    page.ask(PROMPT)
    assert page.all(".error") == []
    drafted = "[...document.querySelectorAll('#strip g')].map((g) => g.querySelectorAll('.kept, .refused').length)"
    assert 1 <= max(page.run(drafted)) <= 3


def test_the_model_card_is_the_engine_s_own(page: Page, running: Running) -> None:
    page.click("#tab-server")
    facts = running.engine_thread.engine.facts
    card = dict(zip(*([each.text for each in page.all(f"#model-card {tag}")] for tag in ("dt", "dd")), strict=True))
    assert card["Format"] == facts.number_format == "float32"
    assert card["Device"] == facts.device == "cpu"
    assert card["Context"] == f"{facts.context} tokens"
    assert card["Cache"] == f"{facts.page_count * facts.page_size:,} tokens"
    assert card["Draft length"] == f"up to {facts.max_draft_tokens} tokens"


def test_a_card_names_the_drafter_and_no_probability_that_was_not_asked_for(page: Page) -> None:
    page.ask(PROMPT)
    page.focus(page.one(".tokens .token.accepted"))
    assert page.text("#card [data-field=drafter]") == "suffix"
    assert not page.one("#card [data-field=target]").is_displayed()


def test_both_of_a_race_are_the_same_text(page: Page, running: Running) -> None:
    page.click("#mode-race")
    page.ask(PROMPT)
    plain, speculative = page.all(".tokens")
    assert plain.get_property("textContent") == speculative.get_property("textContent") == answer_of(running)
    assert page.all(".answer:first-child .accepted, .answer:first-child .bonus") == []
    assert len(page.all(".answer:last-child .accepted")) > 5
    assert page.text(".banner .chip") == "identical"
    assert page.text(".banner p").startswith("The same text, character for character. Plain ")


def test_charts_come_from_metrics(page: Page) -> None:
    page.ask(PROMPT)
    lines = [f"[data-chart={name}] .line" for name in ("rate", "alpha", "tau", "queue", "pages")]
    page.wait(lambda: all(page.one(line).get_attribute("d") for line in lines))
    label = "document.querySelector('[data-chart=queue] svg').getAttribute('aria-label')"
    page.wait(lambda: page.run(label) == "Requests over the last two minutes; now running 0, waiting 0")


def test_nothing_is_asked_of_others(page: Page, running: Running) -> None:
    page.ask(PROMPT)
    asked = page.run("performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert len(asked) > 5
    assert [address for address in asked if not address.startswith(running.url + "/")] == []
    broken = "fetch('http://127.0.0.1:1/').then(() => 'let through', (error) => error.name)"
    assert page.run(broken) == "TypeError"
    assert any("Content Security Policy" in line for line in page.console())


def test_stop_frees_the_request(page: Page, running: Running) -> None:
    running.target.gate.clear()
    page.ask(PROMPT, ends=False)
    assert running.target.entered.wait(20)
    page.one("#stop").click()
    page.idle()
    running.target.gate.set()
    page.wait(lambda: counter(running, 'outrider_requests_total{finish_reason="cancelled"}') == 1)
    assert counter(running, "outrider_pages_used") == 0


def test_locked_server_still_shows_the_page(driver: Chrome, serve: Callable[..., Running]) -> None:
    locked = serve(api_keys=("open-sesame",))
    page = Page(driver, locked.url)
    assert "wants an API key" in page.text("#fact-server")
    page.set("key", "open-sesame")
    page.wait(lambda: page.text("#fact-server") == "ready")
    page.ask("a")
    assert page.all(".error") == []
    assert page.text(".markdown") != ""
