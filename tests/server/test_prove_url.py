"""`prove --url` against our server, and against one with a fault that a proxy plants."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_world import Running, ToyWriter, start
from torch import Tensor

from outrider.core.errors import ConfigError
from outrider.prove.api import Api, ApiError
from outrider.prove.checks import Check, Proof
from outrider.prove.journal import Journal, run_tasks
from outrider.prove.remote import RemoteProof, RemoteSettings

PROMPTS = ("the rain in the tale is the rain", "a tin hat, a tin hat, a tin", "no one is there at the inn")
Fault = Callable[[dict[str, Any], dict[str, Any]], None]
"""Changes an answer, given the request's body, or the body before it is passed on."""


class Letters(ToyWriter):
    """Writes no parts of characters, whose texts would all be the same."""

    def _make_row(self, tail: tuple[int, ...]) -> Tensor:
        row = super()._make_row(tail)
        row[[0xC3, 0xA9]] -= 30
        return row


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    running = start(Letters(), max_batch=8, drafter="suffix:min_prob=0")
    yield running
    running.stop()


@contextmanager
def proxy(upstream: str, before: Fault | None = None, after: Fault | None = None) -> Iterator[str]:
    """A server that passes on what it is asked, with a fault where speculation is on."""

    client = httpx.Client(timeout=60)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._pass(None)

        def do_POST(self) -> None:
            self._pass(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _pass(self, body: dict[str, Any] | None) -> None:
            on = body is not None and not body.get("speculation", {}).get("off")
            if body is not None and on and before:
                before(body, {})
            answer = client.request(self.command, upstream + self.path, json=body).raise_for_status().json()
            if body is not None and on and after:
                after(body, answer)
            told = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()
    client.close()


def prove(folder: Path, url: str, *only: str, draws: int = 64, **options: Any) -> list[Check]:
    """only: what the keys of the tasks that run begin with, besides those that all need; without any, all run."""
    settings = RemoteSettings(url=url, draws=draws, max_tokens=16, batch=4, prompts=PROMPTS, **options)
    journal = Journal(folder, {"url": 1})
    wanted = ("server", "texts, greedy", *only) if only else ("",)
    tasks = [task for task in RemoteProof(settings, journal).tasks() if task.key.startswith(wanted)]
    return run_tasks(tasks, journal, lambda key, done, total: None)


def failing(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if check.status == "fails"]


def test_our_server_holds(served: Running, tmp_path: Path):
    checks = prove(tmp_path, served.url, seeded=True, draws=256)
    assert [(check.name, check.detail) for check in checks if check.status != "holds"] == []
    assert Proof({}, checks, 0.0).exit_code == 0
    texts = [check for check in checks if check.group == "texts"]
    assert len(texts) == 10
    assert max(check.figures["cached"] for check in texts) >= 16
    assert all("8 ways" in check.detail for check in texts)
    assert sum(check.group == "sampled" for check in checks) > 8


def test_a_token_exchanged_where_the_cache_hits_is_found(served: Running, tmp_path: Path):
    seen: set[tuple[str, str]] = set()

    def corrupt(body: dict[str, Any], answer: dict[str, Any]) -> None:
        key = body["prompt"], body.get("cache_salt", "")
        choice = answer["choices"][0]
        if key in seen and body["max_tokens"] > 8:
            tokens = choice["logprobs"]["tokens"]
            tokens[5] = "q"
            choice["text"] = "".join(tokens)
        seen.add(key)

    with proxy(served.url, after=corrupt) as url:
        checks = prove(tmp_path, url, "server")
    broken = [check for check in checks if check.status == "fails"]
    assert len(broken) == len(PROMPTS)
    for check in broken:
        assert "bug" in check.detail
        assert set(check.figures["differences"]) == {"on, alone, prefix hit", "on, batched, prefix hit"}


def test_a_stop_string_missed_is_found(served: Running, tmp_path: Path):
    with proxy(served.url, before=lambda body, _: body.pop("stop", None)) as url:
        checks = prove(tmp_path, url, "texts, options")
    assert [name for name in failing(checks) if "stop string" in name] == failing(checks) != []


def test_log_probabilities_that_move_are_found(served: Running, tmp_path: Path):
    def shift(body: dict[str, Any], answer: dict[str, Any]) -> None:
        lists = answer["choices"][0]["logprobs"]
        lists["token_logprobs"] = [value and value - 0.5 for value in lists["token_logprobs"]]

    with proxy(served.url, after=shift) as url:
        assert len(failing(prove(tmp_path, url, "server"))) == len(PROMPTS)


def test_a_bias_of_sampled_texts_is_found(served: Running, tmp_path: Path):
    dice = random.Random(1)

    def favour_the_likeliest(body: dict[str, Any], answer: dict[str, Any]) -> None:
        """Most of the first tokens are the likeliest one; what would not have followed it is left out."""
        if body.get("temperature") and dice.random() < 0.8:
            lists = answer["choices"][0]["logprobs"]
            for name, values in lists.items():
                lists[name] = values[:1]
            lists["tokens"] = [max(lists["top_logprobs"][0], key=lists["top_logprobs"][0].__getitem__)]

    with proxy(served.url, after=favour_the_likeliest) as url:
        found = failing(prove(tmp_path, url, "sampled", "pooled", draws=300))
    assert "server: all rows together, likely and rare tokens" in found


def test_without_a_switch_a_second_server_is_the_judge(served: Running, tmp_path: Path):
    def exchange(body: dict[str, Any], answer: dict[str, Any]) -> None:
        if body["max_tokens"] > 8:
            answer["choices"][0]["logprobs"]["tokens"][3] = "q"

    with proxy(served.url, after=exchange) as url:
        assert len(failing(prove(tmp_path, url, "server", plain_url=served.url))) == len(PROMPTS)


def test_a_server_that_does_not_answer_is_named():
    with pytest.raises(ApiError, match="is the server running there"):
        Api("http://127.0.0.1:9").kind()
    with pytest.raises(ConfigError, match="is an address such as"):
        Api("file:///etc/passwd")
