"""A server on a toy target, run in a thread of this process, and plain sockets to knock on it with."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from server_world import PATIENCE

from outrider.core.sampling import Token
from outrider.llm import LLM
from outrider.loading.load import LoadedModel
from outrider.server.app import create_app
from outrider.server.http.limits import HttpLimits
from outrider.server.http.protocol import BoundedHttpProtocol, bounded_protocol
from outrider.server.ops.logs import LineFormatter
from outrider.server.queue.engine_thread import EngineThread
from outrider.server.queue.local_engine import LocalEngine
from outrider.server.run import uvicorn_options
from outrider.server.settings import Settings
from outrider.testing.toy import ByteTokenizer, ToyRunner

KEY = "sk-outrider-test-key"
OTHER_KEY = "sk-another-test-key"


class ChatBytes(ByteTokenizer):
    """The byte tokenizer with a chat template of the plainest kind."""

    bos_id = None
    tokens = (*(chr(i) for i in range(256)), "")

    def encode(self, text: str, *, special: bool = True, allow_special_tokens: bool = True) -> list[Token]:
        return list(text.encode())

    def token_text(self, token: Token) -> str:
        return self.tokens[token]

    def encode_chat(self, messages: Sequence[Any], **options: Any) -> list[Token]:
        return self.encode("".join(f"{message['role']}: {message['content']}\n" for message in messages))


def toy_llm(target: ToyRunner | None = None, drafter: str = "suffix") -> LLM:
    made = target or ToyRunner(257, context=512, cache_tokens=4096, order=1)
    loaded = LoadedModel("toy", Path("toy"), made, ChatBytes(), "float32")  # pyright: ignore[reportArgumentType]
    return LLM(loaded, drafter=drafter, max_batch=4, adaptive=False)


class Heard(logging.Handler):
    """Every line of the log, and a way to wait for one: a request's comes after its answer."""

    def __init__(self, lines: LineFormatter) -> None:
        super().__init__()
        self.setFormatter(lines)
        self.lines: list[str] = []
        self.more = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(("httpx", "httpcore")):
            return  # the client, which lives in this process too
        with self.more:
            self.lines.append(self.format(record))
            self.more.notify_all()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def parsed(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in list(self.lines)]

    def of(self, request_id: str) -> dict[str, Any]:
        """The one line about a request, when it is there."""
        found: list[dict[str, Any]] = []

        def there() -> bool:
            found[:] = [each for each in self.parsed() if (each["event"], each.get("id")) == ("request", request_id)]
            return bool(found)

        with self.more:
            if not self.more.wait_for(there, PATIENCE):
                raise TimeoutError(f"nothing was logged of {request_id}")
        (line,) = found
        return line

    def requests(self, count: int) -> list[dict[str, Any]]:
        """The lines about requests, when there are so many."""

        def found() -> list[dict[str, Any]]:
            return [each for each in self.parsed() if each["event"] == "request"]

        with self.more:
            if not self.more.wait_for(lambda: len(found()) >= count, PATIENCE):
                raise TimeoutError(f"{len(found())} requests were logged, not {count}")
        return found()


class Running:
    """A server that answers, and what it has logged."""

    def __init__(self, port: int, engine_thread: EngineThread, app: Any, heard: Heard, server: uvicorn.Server) -> None:
        self.port, self.engine_thread, self.app, self.heard, self.server = port, engine_thread, app, heard, server
        self.url = f"http://127.0.0.1:{port}"

    @property
    def connections(self) -> list[BoundedHttpProtocol]:
        return [each for each in self.server.server_state.connections if isinstance(each, BoundedHttpProtocol)]

    def client(self, key: str | None = KEY) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE, trust_env=False)

    def socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)


@contextmanager
def captured_log(*, texts: bool = False) -> Iterator[Heard]:
    """All that any logger of this process says, as the server writes it."""
    handler = Heard(LineFormatter("json", with_text=texts))
    root, server = logging.getLogger(), logging.getLogger("outrider.server")
    before = root.level, server.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    server.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        root.removeHandler(handler)
        root.setLevel(before[0])
        server.setLevel(before[1])


@contextmanager
def serving(llm: LLM | None = None, protocol: HttpLimits | None = None, **options: Any) -> Iterator[Running]:
    """A server with these settings on a free port of the loopback address. protocol: limits of its connections."""
    settings = Settings(served_name="toy", **{"api_keys": (KEY, OTHER_KEY), **options})
    engine = LocalEngine(llm or toy_llm())
    engine_thread = EngineThread(lambda: engine, settings.max_queue)
    app = create_app(engine_thread, settings)
    tuned: dict[str, Any] = uvicorn_options(settings) | ({"http": bounded_protocol(protocol)} if protocol else {})
    config = uvicorn.Config(app, host="127.0.0.1", port=0, lifespan="on", **tuned)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    with captured_log(texts=settings.log_prompts) as heard:
        engine_thread.start()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        if not engine_thread.loaded.wait(PATIENCE):
            raise TimeoutError("the toy model did not load")
        try:
            yield Running(listener.getsockname()[1], engine_thread, app, heard, server)
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
            engine_thread.drain(0)
            engine_thread.stopped.wait(PATIENCE)


def exchange(running: Running, request: bytes | Iterator[bytes], *, half_close: bool = False) -> tuple[int, bytes]:
    """Send bytes as they are; the status and the body that come back. An answer may come before all is sent."""
    with running.socket() as sock:
        try:
            for piece in [request] if isinstance(request, bytes) else request:
                sock.sendall(piece)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the server has closed already; its answer is still to be read
        return read_answer(sock)


def read_answer(sock: socket.socket) -> tuple[int, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = sock.recv(65536)
        if not piece:
            raise ConnectionError(f"no whole answer: {data!r}")
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    fields = {k.strip().lower(): v.strip() for k, _, v in (line.partition(b":") for line in head.split(b"\r\n")[1:])}
    while len(body) < int(fields.get(b"content-length", b"0")):
        piece = sock.recv(65536)
        if not piece:
            break
        body += piece
    return int(head.split(b" ", 2)[1]), body


def post(body: bytes, *headers: str, path: str = "/v1/completions", host: str = "localhost", key: str = KEY) -> bytes:
    """A request as bytes; its length is said unless headers say otherwise."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", f"Authorization: Bearer {key}", *headers]
    if not any(line.lower().startswith("content-type") for line in lines):
        lines.append("Content-Type: application/json")
    if not any(line.lower().startswith(("content-length", "transfer-encoding")) for line in lines):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
