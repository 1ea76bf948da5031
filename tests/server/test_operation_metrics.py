"""/metrics against counts made from the answers themselves, read by Prometheus' own parser."""

from __future__ import annotations

import json
import math
import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from operation_world import KEY, Running, exchange, post, serving, toy_llm
from prometheus_client.parser import text_string_to_metric_families

from outrider.core.sequence import Span
from outrider.runners.base import Scores
from outrider.runners.device_state import DeviceState
from outrider.testing.toy import ToyRunner

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def running() -> Iterator[Running]:
    with serving() as made:
        yield made


def scrape(running: Running) -> Samples:
    with running.client() as client:
        answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def summed(samples: Samples, name: str) -> float:
    return sum(count for (found, _), count in samples.items() if found == name)


def complete(client: httpx.Client, **options: Any) -> dict[str, Any]:
    body = {"prompt": "abcabcabcabc", "max_tokens": 24, "seed": 1, "temperature": 0.3, **options}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_tokens_and_speculation_add_up_to_what_the_answers_say(running: Running):
    expected: Counter[str] = Counter()
    per_position: Counter[int] = Counter()
    finishes: Counter[str] = Counter()
    with running.client() as client:
        for i in range(6):
            answer = complete(client, n=1 + i % 3, seed=i, speculation={"off": True} if i == 5 else None)
            usage, spec = answer["usage"], answer["metrics"]["speculative_decoding"]
            expected["prompt"] += usage["prompt_tokens"] * len(answer["choices"])
            expected["generation"] += usage["completion_tokens"]
            expected["drafts"] += spec["num_spec_steps"]
            expected["draft_tokens"] += spec["num_draft_tokens"]
            expected["accepted"] += spec["num_accepted_draft_tokens"]
            per_position.update(dict(enumerate(spec["num_accepted_tokens_per_pos"])))
            finishes.update(choice["finish_reason"] for choice in answer["choices"])
    samples = scrape(running)
    assert expected["accepted"] > 20  # the test says something
    assert value(samples, "outrider_prompt_tokens_total") == expected["prompt"]
    assert value(samples, "outrider_generation_tokens_total") == expected["generation"]
    for name, key in (("drafts", "drafts"), ("draft_tokens", "draft_tokens"), ("accepted_tokens", "accepted")):
        assert value(samples, f"outrider_spec_{name}_total", drafter="suffix") == expected[key]
        assert value(samples, f"vllm:spec_decode_num_{name}_total", model_name="toy", engine="0") == expected[key]
    for position, count in per_position.items():
        at = {"position": str(position)}
        assert value(samples, "outrider_spec_accepted_tokens_per_pos_total", drafter="suffix", **at) == count
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        assert value(samples, name, model_name="toy", engine="0", **at) == count
    assert summed(samples, "vllm:spec_decode_num_accepted_tokens_per_pos_total") == expected["accepted"]
    assert summed(samples, "outrider_spec_drafts_per_pos_total") == expected["draft_tokens"]  # chains alone here
    assert value(samples, "outrider_requests_total", finish_reason="scored") == 0
    for reason in ("stop", "length"):
        assert value(samples, "outrider_requests_total", finish_reason=reason) == finishes[reason]
    texts = sum(finishes.values())
    for name in ("request_queue_time", "time_to_first_token", "e2e_request_latency"):
        assert value(samples, f"outrider_{name}_seconds_count") == texts
        assert value(samples, f"outrider_{name}_seconds_bucket", le="+Inf") == texts
    assert value(samples, "outrider_requests_running") == value(samples, "outrider_requests_waiting") == 0
    assert value(samples, "outrider_pages_used") == 0
    assert value(samples, "outrider_pages_total") == running.engine_thread.engine.facts.page_count
    assert value(samples, "outrider_state", state="ready") == 1
    assert summed(samples, "outrider_state") == 1


def test_inter_token_times_are_those_after_a_text_s_first_tokens(running: Running):
    with running.client() as client:
        answer = complete(client, speculation={"off": True}, max_tokens=20, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 20
    samples = scrape(running)
    assert value(samples, "outrider_inter_token_latency_seconds_count") == 19
    first = value(samples, "outrider_time_to_first_token_seconds_sum")
    between = value(samples, "outrider_inter_token_latency_seconds_sum")
    whole = value(samples, "outrider_e2e_request_latency_seconds_sum")
    assert first + between == pytest.approx(whole, abs=0.02)


def test_a_text_that_is_only_scored_is_counted_as_such(running: Running):
    with running.client() as client:
        complete(client, prompt="abc", max_tokens=1, echo=True, logprobs=1)
    samples = scrape(running)
    assert value(samples, "outrider_requests_total", finish_reason="scored") == 1
    assert value(samples, "outrider_requests_total", finish_reason="length") == 1
    assert value(samples, "outrider_generation_tokens_total") == 1


def test_answers_are_counted_by_route_and_status_and_never_by_what_a_client_wrote(running: Running):
    asked: Counter[tuple[str, str]] = Counter()
    with running.client() as client, running.client(None) as stranger:
        for method, path, route, status, who in (
            ("GET", "/v1/models", "/v1/models", 200, client),
            ("GET", "/v1/models/toy", "/v1/models/{name:path}", 200, client),
            ("GET", "/v1/models/evil-name", "/v1/models/{name:path}", 404, client),
            ("GET", "/v1/models", "/v1/models", 401, stranger),
            ("GET", "/health", "/health", 200, stranger),
            ("GET", "/evil-path", "other", 404, client),
            ("POST", "/v1/completions", "/v1/completions", 415, client),
            ("GET", "/v1/completions", "/v1/completions", 405, client),
        ):
            answer = who.request(method, path, headers={"x-request-id": "evil-id"})
            assert answer.status_code == status, (path, answer.text)
            asked[route, str(status)] += 1
        text = client.get("/metrics").text
        asked["/metrics", "200"] += 1
    assert len(running.heard.requests(sum(asked.values()))) == sum(asked.values())
    samples = scrape(running)
    got = {
        (dict(labels)["route"], dict(labels)["status"]): count
        for (name, labels), count in samples.items()
        if name == "outrider_http_requests_total"
    }
    assert got == dict(asked)
    assert "evil" not in text
    assert KEY not in text


def test_vllm_s_own_reading_of_the_text_gives_the_same_acceptance(running: Running):
    """`vllm bench serve` splits lines by hand, and sums all that begin with a name and end in _total."""
    with running.client() as client:
        before = bench_reads(client.get("/metrics").text)
        specs = [complete(client, seed=seed)["metrics"]["speculative_decoding"] for seed in range(4)]
        after = bench_reads(client.get("/metrics").text)
    assert before == {"drafts": 0, "draft_tokens": 0, "accepted": 0, "positions": {}}
    assert after["drafts"] == sum(spec["num_spec_steps"] for spec in specs)
    assert after["draft_tokens"] == sum(spec["num_draft_tokens"] for spec in specs)
    accepted = sum(spec["num_accepted_draft_tokens"] for spec in specs)
    assert after["accepted"] == accepted == sum(after["positions"].values())


def bench_reads(text: str) -> dict[str, Any]:
    read: dict[str, Any] = {"drafts": 0, "draft_tokens": 0, "accepted": 0, "positions": {}}
    for line in text.splitlines():
        if not line.startswith("vllm:spec_decode"):
            continue
        name, number = line.split("{")[0], int(float(line.split()[-1]))
        if name == "vllm:spec_decode_num_drafts_total":
            read["drafts"] += number
        elif name == "vllm:spec_decode_num_draft_tokens_total":
            read["draft_tokens"] += number
        elif name == "vllm:spec_decode_num_accepted_tokens_total":
            read["accepted"] += number
        elif name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
            (position,) = re.findall(r'position="(\d+)"', line)
            read["positions"][int(position)] = read["positions"].get(int(position), 0) + number
        else:
            raise AssertionError(f"a line vLLM does not have: {line}")
    return read


class Gated(ToyRunner):
    """Scores `free` passes, then waits at each for someone to open the gate."""

    def __init__(self, free: int) -> None:
        super().__init__(257, context=512, cache_tokens=4096, order=1)
        self.free, self.reached, self.gate = free, threading.Event(), threading.Event()

    def score(self, spans: Sequence[Span], after: DeviceState | None = None) -> Scores:
        self.free -= 1
        if self.free < 0:
            self.reached.set()
            if not self.gate.wait(20):
                raise TimeoutError("nobody opened the gate")
        return super().score(spans, after)


def test_figures_move_while_a_text_is_written_and_a_cancelled_one_is_kept():
    target = Gated(free=10)
    with serving(toy_llm(target, drafter="none")) as running:
        body = json.dumps({"prompt": "ab", "max_tokens": 100, "stream": True, "ignore_eos": True}).encode()
        with running.socket() as sock:
            sock.sendall(post(body))
            assert target.reached.wait(20)
            samples = scrape(running)
            assert value(samples, "outrider_generation_tokens_total") == 10
            assert value(samples, "outrider_requests_running") == 1
            assert value(samples, "outrider_pages_used") == 1
            assert value(samples, "outrider_requests_total", finish_reason="cancelled") == 0
        target.free = 3  # the client has left; how soon that is seen is not this test's matter
        target.gate.set()
        line = next(line for line in running.heard.requests(2) if line["route"] == "/v1/completions")
        ended = scrape(running)
        assert value(ended, "outrider_requests_total", finish_reason="cancelled") == 1
        assert 10 <= value(ended, "outrider_generation_tokens_total") < 100
        assert value(ended, "outrider_pages_used") == 0
        assert line["finish"] == "cancelled"
        assert line["tokens"] == value(ended, "outrider_generation_tokens_total")


class Poisoned(ToyRunner):
    """Gives NaN after the token of `poison`."""

    def score(self, spans: Sequence[Span], after: DeviceState | None = None) -> Scores:
        scores = super().score(spans, after)
        if any(ord("!") in span.tokens for span in scores.spans):
            scores.logits[0] = math.nan
        return scores


def test_a_text_the_model_gave_no_numbers_for_is_counted_as_corrupted():
    with serving(toy_llm(Poisoned(257, context=512, order=1), drafter="none")) as running:
        status, answer = exchange(running, post(b'{"prompt": "ab!", "max_tokens": 3}'))
        assert status == 500, answer
        samples = scrape(running)
        assert value(samples, "outrider_corrupted_requests_total") == 1
        assert value(samples, "outrider_requests_total", finish_reason="error") == 1
        with running.client() as client:
            complete(client)
        assert value(scrape(running), "outrider_corrupted_requests_total") == 1


def test_the_dashboard_asks_only_for_what_there_is(running: Running):
    board = json.loads((Path(__file__).parents[2] / "examples" / "grafana" / "outrider.json").read_text())
    with running.client() as client:
        complete(client)
        text = client.get("/metrics").text
    there = {
        (sample.name, label)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        for label in ("", *sample.labels)
    }
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(asked) > 20
    for expression in asked:
        assert expression.count("(") == expression.count(")")
        assert expression.count("{") == expression.count("}")
        names = re.findall(r"outrider_\w+", expression)
        assert names
        grouped = {word for by in re.findall(r"by \(([\w, ]+)\)", expression) for word in by.split(", ")}
        for name in names:
            for label in ("", *(grouped - {"instance"})):
                assert (name, label) in there, f"{expression}: {name} has no {label}"
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_docs_list_every_metric_there_is_and_no_other(running: Running):
    page = (Path(__file__).parents[2] / "docs" / "operation.md").read_text()
    listed = set(re.findall(r"^\| `([\w:]+)`", page, re.MULTILINE))
    with running.client() as client:
        complete(client)
        families = list(text_string_to_metric_families(client.get("/metrics").text))
    assert listed == {family.name + ("_total" if family.type == "counter" else "") for family in families}
