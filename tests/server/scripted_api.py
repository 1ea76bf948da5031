"""A server that says what a test told it to: the page's files with the strict policy, and scripted answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any, ClassVar

PAGE = files("outrider.server.web") / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FILES = {path.name: path.read_bytes() for path in PAGE.iterdir()}
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
CARD = {
    "id": "scripted",
    "drafter": "suffix",
    "max_draft_tokens": 15,
    "number_format": "int4",
    "weight_bytes": 538_000_000,
    "device": "cpu",
    "max_model_len": 8192,
    "cache_tokens": 65536,
    "memory": "",
}
TEXT = "one word word word four five."
"""The answer to "word"."""
MARKDOWN = """# Title

Some **bold**, *italic*, `code` and a [link](https://example.org/a) or [bad](javascript:alert(1)).

> quoted
> text

1. one
2. two
   - nested

| a | b |
|---|--:|
| 1 | 2 |

```python
def f(x):
    return x
```

![pixel](https://example.org/i.png) <img src=x onerror="document.title='owned'">
"""
LONG = "First.\n\n" + "Some words in a line.\n\n" * 360 + "```\n" + "code = code\n" * 400 + "```\n" + "- item\n" * 450
HOSTILE = ["<img src=x onerror=\"document.title='owned'\">", "<script>document.title='owned'</script>", " &amp; </div>"]

PLAIN_TEXTS = {
    "hostile": HOSTILE,
    "markdown": [MARKDOWN[i : i + 3] for i in range(0, len(MARKDOWN), 3)],
    "long": [LONG[i : i + 4] for i in range(0, len(LONG), 4)],
    "undrafted": ["No", " draft", "."],
}
"""Answers without drafts, by the prompt."""


def entry(token: str, origin: str, round_: int, position: int = 0, **more: Any) -> dict[str, Any]:
    """One token's provenance, as the server writes it."""
    drafter = "" if origin == "plain" else "suffix"
    known = {"token_id": len(token), "drafted": 0, "target_prob": 0.75, "draft_prob": None}
    place = {"origin": origin, "drafter": drafter, "round": round_, "position": position}
    return {"token": token, **known, **place, **more}


def chunk(entries: list[dict[str, Any]], finish: str | None = None) -> dict[str, Any]:
    text = "".join(each["token"] for each in entries)
    return {"choices": [{"delta": {"content": text}, "provenance": entries, "finish_reason": finish}]}


class Scripted(ThreadingHTTPServer):
    """Answers by the words of the last message; keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reset()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def reset(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.key = ""
        self.loading = False
        self.gone = threading.Event()
        """Set when a client walks away from an endless answer."""
        self.gate = threading.Event()
        """Set to let the second half of a long answer go."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open, as those of the real server do
    server: Scripted  # pyright: ignore[reportIncompatibleVariableOverride]
    refusals: ClassVar[dict[str, int]] = {"busy": 429, "loading": 503, "large": 413}

    def do_GET(self) -> None:
        path = "/page/index.html" if self.path == "/" else self.path
        if path.startswith("/page/"):
            name = path.removeprefix("/page/")
            self._send(200, FILES[name], TYPES[name.rsplit(".", 1)[1]])
        elif self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self._refuse(401, "no key or a wrong one")
        elif path == "/v1/models" and self.server.loading:
            self._refuse(503, "loading the model")
        elif path == "/v1/models":
            self._send(200, json.dumps({"data": [CARD]}).encode(), "application/json")
        else:
            self._send(200, b"outrider_requests_running 1\n", "text/plain")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        word = body["messages"][-1]["content"]
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            return self._refuse(401, "no key or a wrong one")
        if word in self.refusals:
            return self._refuse(self.refusals[word], f"scripted to be {word}")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")  # which ends the stream
        self.end_headers()
        try:
            for each in self._script(word, body["speculation"]["off"]):
                self.wfile.write(f"data: {each}\n\n".encode())
                self.wfile.flush()
        except OSError:
            self.server.gone.set()
        return None

    def _script(self, word: str, off: bool) -> Iterator[str]:
        if word == "endless":
            for i in range(1 << 20):
                yield json.dumps(chunk([entry(f"{i} ", "plain", i)]))
                self.server.gone.wait(0.02)
        elif word == "break":
            yield json.dumps(chunk([entry("half", "plain", 0)]))
            yield json.dumps({"error": {"message": "the engine has failed", "type": "server_error"}})
        elif word in PLAIN_TEXTS or off:
            texts = PLAIN_TEXTS.get(word, ["one", *[f" {word}"] * 3, " four", " five", "."])
            for i, text in enumerate(texts):
                if i == len(texts) // 2 and word == "long":
                    self.server.gate.wait(20)
                yield json.dumps(chunk([entry(text, "plain", i)], "stop" if i == len(texts) - 1 else None))
            yield "[DONE]"
        elif word == "rejected":
            yield json.dumps(chunk([entry("one", "plain", 0)]))
            yield json.dumps(chunk([entry(f" {i}", "recovered", i, drafted=10) for i in range(1, 5)], "length"))
            yield "[DONE]"
        else:
            word = "other" if word == "differ" else word
            yield json.dumps(chunk([entry("one", "plain", 0)]))
            stood = [entry(f" {word}", "accepted", 1, i, drafted=5, draft_prob=0.5) for i in range(3)]
            yield json.dumps(chunk([*stood, entry(" four", "recovered", 1, 3, drafted=5)]))
            whole = [entry(" five", "accepted", 2, drafted=1, target_prob=None), entry(".", "bonus", 2, 1, drafted=1)]
            yield json.dumps(chunk(whole, "stop"))
            yield "[DONE]"

    def _refuse(self, status: int, message: str) -> None:
        self._send(status, json.dumps({"error": {"message": message}}).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Content-Length", str(len(body)))
        if status == 429:
            self.send_header("Retry-After", "3")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
        """Quiet: the tests look at `asked`."""
