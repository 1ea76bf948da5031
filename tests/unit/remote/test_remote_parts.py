"""The parts of the server before other servers, each against an independent judge."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.errors import ConfigError, RequestError
from outrider.remote.bodies import body_fields, replica_body
from outrider.remote.figures import Figures
from outrider.remote.metrics import speculation_counts
from outrider.remote.prefixes import MAX_PAGES, PAGE_CHARS, PrefixTable, page_hashes, prompt_text
from outrider.remote.replica import Replica, ReplicaCard, check_url, read_card
from outrider.remote.request_queue import RequestQueue
from outrider.remote.routing import LOAD_FACTOR, choose
from outrider.remote.sse_reader import EventReader, MalformedEventError, ServerEvent
from outrider.server.openai.request_schema import ChatRequest
from outrider.server.queue.jobs import QueueFull

VLLM = ReplicaCard("vllm", "theirs", "0.32.0", 512)
EVENTS = [ServerEvent('{"a": "é\\n"}', "one"), ServerEvent("[DONE]"), ServerEvent("two\nlines")]
WIRE = 'event: one\ndata: {"a": "é\\n"}\n\n: a comment\n\ndata: [DONE]\r\n\r\ndata: two\ndata: lines\n\n'.encode()


@given(st.lists(st.integers(0, len(WIRE)), max_size=12))
def test_events_do_not_depend_on_how_bytes_arrive(cuts: list[int]):
    places = [0, *sorted(cuts), len(WIRE)]
    reader = EventReader()
    found = [event for a, b in itertools.pairwise(places) for event in reader.feed(WIRE[a:b])]
    assert found == EVENTS


def test_what_comes_before_nonsense_is_read():
    feed = EventReader().feed(b"data: 1\n\nnonsense\n\n")
    assert next(feed) == ServerEvent("1")
    with pytest.raises(MalformedEventError, match="nonsense"):
        next(feed)


@given(st.text(max_size=3 * PAGE_CHARS), st.text(max_size=PAGE_CHARS), st.text(max_size=PAGE_CHARS))
def test_equal_beginnings_have_equal_pages(common: str, one: str, other: str):
    a, b = page_hashes("s", common + one), page_hashes("s", common + other)
    full = min(len(common) // PAGE_CHARS, MAX_PAGES)
    assert a[:full] == b[:full]
    if common + one != common + other and len(common + one) >= PAGE_CHARS and len(common + other) >= PAGE_CHARS:
        shared = sum(x == y for x, y in zip(a, b, strict=False))
        pages = [
            (text[: (i + 1) * PAGE_CHARS] for i in range(len(text) // PAGE_CHARS))
            for text in (common + one, common + other)
        ]
        assert shared == sum(x == y for x, y in zip(*pages, strict=False))
    assert not set(a) & set(page_hashes("another salt", common + one))


def test_a_prompt_of_any_form_has_a_beginning():
    assert prompt_text({"prompt": "a"}) == prompt_text({"prompt": ["a", "b"]}) == "a"
    assert prompt_text({"prompt": [1, 2]}) != prompt_text({"prompt": [1, 3]})
    first = [{"role": "user", "content": "x" * 300}]
    begun, later = (prompt_text({"messages": messages}) for messages in (first, [*first, {"role": "assistant"}]))
    assert page_hashes("", begun)[0] == page_hashes("", later)[0]


def replicas(*loads: int) -> list[Replica]:
    return [Replica(f"http://r{i}", state="ready", load=load) for i, load in enumerate(loads)]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.text(max_size=20))
def test_nobody_is_given_more_than_a_quarter_above_the_mean(loads: list[int], prompt: str):
    made = replicas(*loads)
    table, hashes = PrefixTable(), page_hashes("", prompt)
    table.note(hashes, made[loads.index(max(loads))].name)  # the busiest has it cached
    chosen = choose(made, hashes, table)
    assert chosen.load + 1 <= LOAD_FACTOR * (sum(loads) + 1) / len(loads) + 1
    if max(loads) < LOAD_FACTOR * (sum(loads) + 1) / len(loads):
        assert chosen.load == max(loads), "where the load allows, the cache decides"


def test_the_longest_beginning_decides():
    made, table = replicas(0, 0, 0), PrefixTable()
    short, long = page_hashes("", "a" * PAGE_CHARS), page_hashes("", "a" * 4 * PAGE_CHARS)
    table.note(short, "http://r1")
    table.note(long[1:], "http://r2")
    assert choose(made, page_hashes("", "a" * 3 * PAGE_CHARS), table).name == "http://r2"
    table.forget("http://r2")
    table.note(short, "http://r1")
    assert choose(made, short, table).name == "http://r1"


def test_a_replica_that_goes_moves_only_its_own_prompts():
    made = replicas(0, 0, 0, 0)
    hashes = [page_hashes("", f"prompt {i}") for i in range(400)]
    before = [choose(made, each, PrefixTable()).name for each in hashes]
    after = [choose(made[:3], each, PrefixTable()).name for each in hashes]
    assert [b for a, b in zip(before, after, strict=True) if a != "http://r3"] == [
        a for a in before if a != "http://r3"
    ]
    assert all(70 < count < 130 for count in Counter(before).values())


def test_the_table_forgets_what_was_used_longest_ago():
    table = PrefixTable(max_pages=2)
    for key in (b"a", b"b", b"a", b"c"):
        table.note([key], "x")
    assert [table.owners([key]) for key in (b"a", b"b", b"c")] == [["x"], [], ["x"]]


@pytest.mark.parametrize("url", ["ftp://x", "x:80", "http://", "http://x?y=1", "http://a:b@x"])
def test_addresses_that_are_none(url: str):
    with pytest.raises(ConfigError, match="--engine-url"):
        check_url(url)


def test_addresses_with_and_without_v1():
    assert {check_url(url) for url in ("http://x:1", "http://x:1/", "http://x:1/v1", "http://x:1/v1/")} == {
        "http://x:1"
    }


def test_a_card_of_another_engine_is_refused():
    card = {"id": "m", "owned_by": "llamacpp", "max_model_len": 5}
    with pytest.raises(ValueError, match="only vLLM and Outrider"):
        read_card({"data": [card]}, {})
    with pytest.raises(ValueError, match="max_model_len"):
        read_card({"data": [{"id": "m", "owned_by": "vllm"}]}, {})
    assert read_card({"data": [card | {"owned_by": "vllm"}]}, {"version": "1"}) == ReplicaCard("vllm", "m", "1", 5)


def test_an_outrider_is_sent_every_field_and_vllm_its_own():
    body = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "a", "more": 1}], "typical_p": 0.5, "max_tokens": 3, "unknown": 1}
    )
    ours = ReplicaCard("outrider", "theirs", "0.1", 512)
    made = replica_body(body_fields(body), body, ours, "")
    assert made == {
        "model": "theirs",
        "messages": [{"role": "user", "content": "a", "more": 1}],
        "typical_p": 0.5,
        "max_tokens": 3,
    }
    assert replica_body(body_fields(body), body, VLLM, "")["max_completion_tokens"] == 3


def test_figures_of_a_response():
    figures = Figures()
    record = {"acceptance_histogram": [4, 3, 2, 1], "num_spec_steps": 10, "num_accepted_draft_tokens": 10}
    figures.read({"choices": [{"index": 1, "finish_reason": "length"}]})
    figures.read({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 20}})
    figures.read({"choices": [], "metrics": {"speculative_decoding": record | {"num_draft_tokens": 30}}})
    stats = figures.stats()
    tally = stats.drafters["speculation"]
    assert (stats.prompt_tokens, stats.tokens, stats.shared_tokens) == (5, 20, 0)
    assert (tally.rounds, tally.drafted, tally.accepted, tally.accepted_at) == (10, 30, 10, [6, 3, 1])
    assert [event.finish for event in figures.events(2)] == ["stop", "length"]


def test_counters_of_speculation_alone_are_read():
    text = "\n".join(
        [
            'vllm:spec_decode_num_drafts_total{engine="0"} 3.0',
            'vllm:spec_decode_num_drafts_total{engine="1"} 4.0',
            'vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9',
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 2.0',
            'vllm:num_requests_running{engine="0"} 9.0',
        ]
    )
    drafts, positions = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens_per_pos"
    assert speculation_counts(text) == {(drafts, ""): 7, (positions, "1"): 2}


def test_clients_take_turns_and_large_requests_pass_alone():
    async def run() -> None:
        queue = RequestQueue(8, lambda: 2)
        first = queue.submit("a", 2)
        waiting = [queue.submit(client, count) for client, count in (("a", 1), ("a", 1), ("b", 4), ("b", 1))]
        assert first.turn.done()
        assert not any(ticket.turn.done() for ticket in waiting)
        queue.release(first)
        assert [ticket.turn.done() for ticket in waiting] == [True, False, False, False]
        queue.release(waiting[0])
        assert [ticket.turn.done() for ticket in waiting[1:]] == [False, True, False], "b's turn, and it is alone"
        with pytest.raises(QueueFull):
            queue.submit("a", 6)
        with pytest.raises(RequestError, match="11 texts"):
            queue.submit("a", 11)
        queue.release(waiting[3])  # left while it waited
        queue.release(waiting[2])
        assert waiting[1].turn.done()
        queue.release(waiting[1])
        assert (queue.running, queue.waiting) == (0, 0)

    asyncio.run(run())
