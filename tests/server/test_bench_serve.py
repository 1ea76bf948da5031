"""`outrider bench serve` against this package's server, and against one that says what a test told it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from server_world import NAME, Running

from outrider.bench.client import Client, Outcome
from outrider.bench.load import Load, put_under_load
from outrider.bench.prompts import BenchPrompt
from outrider.bench.record import make_header, open_run, read_run
from outrider.bench.scrape import Counters, scrape
from outrider.bench.serve import SERVED, ServeBench, ServePlan, summarize_serve
from outrider.cli.main import main
from outrider.core.errors import ConfigError
from outrider.prove.api import Api

PROMPTS = [BenchPrompt("a", "x", ("one", "two")), BenchPrompt("b", "x", ("a longer one of these",))]
METRICS = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{{model_name="m"}} {}
vllm:spec_decode_num_draft_tokens_total{{model_name="m"}} {}
vllm:spec_decode_num_accepted_tokens_total{{model_name="m"}} {}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",position="0"}} {}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",position="1"}} {}
vllm:prefix_cache_queries_total {}
vllm:prefix_cache_hits_total {}
"""
FACTS = {"machine": {}, "versions": {}, "commit": "", "command": ""}


class Script(BaseHTTPRequestHandler):
    """Answers with the number of messages, in two chunks; what it was asked is kept."""

    protocol_version = "HTTP/1.1"
    asked: list[dict[str, Any]]
    refuse = False

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._send(
                200, METRICS.format(*(each * len(self.asked) for each in (2, 6, 3, 2, 1, 8, 2))).encode(), "text/plain"
            )
            return
        self._send(200, json.dumps({"data": [{"id": "m", "owned_by": "someone"}]}).encode(), "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if self.refuse:
            self._send(429, b'{"error": "busy"}', "application/json")
            return
        chunks = [{"choices": [{"delta": {"content": text}}]} for text in (f"{len(body['messages'])}", " messages")]
        chunks.append({"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 3}})
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        self._send(200, text.encode(), "text/event-stream")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Many connections may come at once: five are the library's default, and more of them are reset."""

    request_queue_size = 128


@pytest.fixture
def scripted() -> Iterator[tuple[str, type[Script]]]:
    kind = type("OwnScript", (Script,), {"asked": []})
    server = Server(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1", kind
    server.shutdown()
    server.server_close()


def measured(api: Api, plan: ServePlan, out=None, export=None) -> ServeBench:
    run = open_run(make_header("serve", {"count": plan.count}, FACTS), out)
    bench = ServeBench(api, api.kind(), PROMPTS, plan, run, export)
    bench.measure_all(lambda *_: None)
    return bench


def test_turns_follow_the_answers(scripted):
    url, kind = scripted
    client = Client(url, "m", {"max_tokens": 5})
    done, seconds = put_under_load(client, PROMPTS, Load(concurrency=1), count=3, seed=0, extra=1)
    assert [(o.prompt, o.turn, o.text) for o in done] == [
        *(("a", 0, "1 messages"), ("a", 1, "3 messages"), ("b", 0, "1 messages")),
        *(("a", 0, "1 messages"), ("a", 1, "3 messages")),
    ]
    assert kind.asked[1]["messages"][1] == {"role": "assistant", "content": "1 messages"}
    assert {key: kind.asked[0][key] for key in ("model", "max_tokens", "stream", "extra")} == {
        "model": "m",
        "max_tokens": 5,
        "stream": True,
        "extra": 1,
    }
    assert seconds >= max(o.ended for o in done) - min(o.started for o in done)


def test_an_open_loop_sends_all(scripted):
    url, kind = scripted
    done, _ = put_under_load(Client(url, "m", {}), PROMPTS, Load(rate=500.0), count=20, seed=3)
    assert len(done) == len(kind.asked) == 30
    assert all(o.waited >= 0 for o in done)
    assert not any(o.error for o in done)


def test_a_server_that_cannot_switch_is_measured_as_it_is(scripted):
    plan = ServePlan(loads=(Load(concurrency=2),), count=2, repeats=2)
    bench = measured(Api(scripted[0]), plan)
    (found,) = summarize_serve(bench.run)
    assert (found.speculation, found.repetitions, found.failed) == (SERVED, 2, 0)
    assert (found.speedup, found.identical) == (None, None)
    # its responses tell neither, its counters do: of each request 2 drafts of 3 tokens, of which 3 are accepted
    assert (found.acceptance_length, found.prefix_hit_rate) == (2.5, 0.25)
    line = bench.run.of("measure")[1]
    assert (line["spec_decode_num_drafts"], line["spec_decode_acceptance_rate"]) == (2 * 3, 50.0)
    assert line["spec_decode_per_position_acceptance_rates"] == [1.0, 0.5]


def test_counters_that_are_not_there():
    assert scrape("http://127.0.0.1:9/v1", {}) == Counters()
    assert Counters().spec_decode() == {}
    assert Counters().prefix_hit_rate() is None


def test_refusals_are_told(scripted):
    url, kind = scripted
    kind.refuse = True
    failed = Client(url, "m", {}).ask([{"role": "user", "content": "x"}], Outcome("p", 0))
    assert (failed.status, failed.error) == (429, '{"error": "busy"}')
    with pytest.raises(ConfigError, match=r"answered none of 2 requests: .*busy"):
        measured(Api(url), ServePlan(loads=(Load(concurrency=1),), count=2, repeats=1))
    nobody = Client("http://127.0.0.1:9/v1", "m", {}).ask([], Outcome("p", 0))
    assert "refused" in nobody.error


def test_speculation_on_and_off_of_our_server(served: Running, tmp_path):
    plan = ServePlan(loads=(Load(concurrency=1), Load(concurrency=3)), count=4, repeats=2, max_tokens=24)
    out, export = tmp_path / "run.jsonl", tmp_path / "export"
    bench = measured(Api(served.url), plan, out, export)
    assert bench.kind.name == "outrider"
    rows = {(row.load["concurrency"], row.speculation): row for row in summarize_serve(read_run(out))}
    assert rows.keys() == {(1, "on"), (1, "off"), (3, "on"), (3, "off")}
    for (_, speculation), row in rows.items():
        assert (row.failed, row.repetitions) == (0, 2)
        assert row.identical == (None if speculation == "off" else (3, 3))
        assert 0 < row.prefix_hit_rate < 1  # prompts are sent twice, and turns build on each other
    assert rows[1, "on"].acceptance_length > 1
    assert rows[1, "off"].acceptance_length is None
    result = json.loads((export / "1-at-once-on-0.json").read_text())
    assert result["completed"] == 6
    records = [json.loads(line) for line in (export / "1-at-once-on-0.profile_export.jsonl").open()]
    assert [r["metrics"]["output_sequence_length"]["value"] for r in records] == result["output_lens"]
    assert sum(r["spec_decode_acceptance"]["num_spec_steps"] for r in records) == result["spec_decode_num_drafts"]
    before = out.read_text()
    measured(Api(served.url), plan, out)
    assert out.read_text() == before  # nothing is measured twice


def test_the_command(served: Running, tmp_path, capsys):
    (tmp_path / "own.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    words = ["bench", "serve", served.url, "--prompts", str(tmp_path / "own.jsonl"), "--concurrency", "2"]
    words += ["--max-tokens", "8", "--repeats", "1", "--rates", "200"]
    with pytest.raises(SystemExit) as left:
        main([*words, "--json"])
    assert left.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["kind"], told["server"], told["served_model"]) == ("serve", "outrider", NAME)
    assert [(each["load"], each["speculation"]) for each in told["loads"]] == [
        ({"concurrency": c, "rate": r}, s) for c, r in ((2, None), (None, 200.0)) for s in ("on", "off")
    ]
    assert {"mean_ttft_ms", "output_throughput"} <= told["runs"][0].keys()
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert "2 at once" in shown
    assert "200 a second" in shown
