"""Connections in bursts, pipelined requests and trailers, sent as raw bytes to a small app behind the HTTP protocol."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from operation_world import KEY, Running, read_answer, serving
from server_world import PATIENCE, LoopClock, until
from uvicorn.server import ServerState

from outrider.server import run
from outrider.server.http import protocol
from outrider.server.http.limits import HttpLimits
from outrider.server.http.protocol import PIECE_BYTES, BoundedHttpProtocol, bounded_protocol
from outrider.server.run import ACCEPTED_AT_ONCE, BACKLOG, uvicorn_options
from outrider.server.settings import Settings

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
BODY = b'{"prompt": "a", "max_tokens": 1}'


class EchoServer:
    """Answers each request with its method, path and body; a request for /wait waits until `gate` is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.seen: list[str] = []
        self.left: list[str] = []
        self.received = 0
        """Bytes."""
        self.server: uvicorn.Server
        self.port = 0

    @property
    def connections(self) -> list[BoundedHttpProtocol]:
        return [each for each in self.server.server_state.connections if isinstance(each, BoundedHttpProtocol)]

    def socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    async def __call__(self, scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        if scope["type"] != "http":
            return
        self.seen.append(scope["path"])
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        if scope["path"] == "/wait" and not await self._opened(receive):
            self.left.append(scope["path"])
            return
        answer = f"{scope['method']} {scope['path']} ".encode() + body
        headers = [(b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def _opened(self, receive: Callable[[], Any]) -> bool:
        """Whether the gate was opened before the client left."""
        leaving = asyncio.ensure_future(receive())
        while not self.gate.is_set() and not leaving.done():
            await asyncio.sleep(0.005)
        leaving.cancel()
        return self.gate.is_set()


@contextmanager
def echoing(limits: HttpLimits | None = None, **options: Any) -> Iterator[EchoServer]:
    """An EchoServer in a thread, with these limits and options of uvicorn."""
    made = EchoServer()
    tuned: dict[str, Any] = uvicorn_options(Settings(served_name="toy")) | options
    bounded = bounded_protocol(limits or HttpLimits())

    def counted(self: BoundedHttpProtocol, data: bytes) -> None:
        bounded.data_received(self, data)
        made.received += len(data)

    tuned["http"] = type("Counted", (bounded,), {"data_received": counted})
    made.server = uvicorn.Server(uvicorn.Config(made, lifespan="off", timeout_graceful_shutdown=1, **tuned))
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    made.port = listener.getsockname()[1]
    thread = threading.Thread(target=made.server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    until(lambda: made.server.started)
    try:
        yield made
    finally:
        made.gate.set()
        made.server.should_exit = True
        thread.join(PATIENCE)


class Reader:
    """The answers of one connection, in order."""

    def __init__(self, sock: socket.socket) -> None:
        self.file = sock.makefile("rb")

    def next(self) -> tuple[int, bytes]:
        status = int(self.file.readline().split(b" ")[1])
        length = 0
        while (line := self.file.readline()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        return status, self.file.read(length)

    def ended(self) -> bool:
        try:
            return self.file.read(1) == b""
        except ConnectionResetError:
            return True


# trailers


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving() as made:
        yield made


def test_a_key_in_a_trailer_lets_nobody_in(running: Running):
    for trailer in (f"Authorization: Bearer {KEY}", f"authorization:Bearer {KEY}\r\nX-Other: a"):
        body = b"%x\r\n%s\r\n0\r\n%s\r\n\r\n" % (len(BODY), BODY, trailer.encode())
        with running.socket() as sock:
            sock.sendall(CHUNKED + b"Content-Type: application/json\r\n\r\n" + body)
            assert read_answer(sock)[0] == 401


def test_trailers_change_nothing_of_a_request(running: Running):
    trailers = (
        b"Host: evil.example\r\nAuthorization: Bearer wrong\r\nContent-Type: text/plain\r\nExpect: 100-continue\r\n"
    )
    key = f"Authorization: Bearer {KEY}\r\nContent-Type: application/json\r\n\r\n".encode()
    with running.socket() as sock:
        sock.sendall(CHUNKED + key + b"%x\r\n%s\r\n0\r\n%s\r\n" % (len(BODY), BODY, trailers) + HEALTH)
        answers = Reader(sock)
        assert [answers.next()[0] for _ in range(2)] == [200, 200]


def test_trailers_may_not_change_how_long_the_body_is():
    with echoing() as server:
        for trailer in (b"Content-Length: 5", b"Transfer-Encoding: identity"):
            with server.socket() as sock:
                sock.sendall(CHUNKED + b"\r\n1\r\nx\r\n0\r\n" + trailer + b"\r\n\r\n" + HEALTH)
                answers = Reader(sock)
                assert answers.next()[0] == 400
                assert answers.ended()


# paths


@pytest.mark.parametrize("path", ["/page/index.html", "/", "/health", "/v1/models", "/metrics"])
@pytest.mark.parametrize("end", ["%0a", "%0A", "%0d", "%0d%0a", "%00", "%7f", "%c2%85"])
def test_a_path_with_a_control_character_is_no_route(running: Running, path: str, end: str):
    with running.client() as client:
        assert client.get(path).status_code == 200
        answer = client.get(path + end)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


# pipelining


def test_many_pipelined_requests_are_all_answered():
    """Far more bytes than headers may have, always with an incomplete request at the end."""
    with echoing() as server, server.socket() as sock:
        count = 5000
        pieces = HEALTH * count

        def send() -> None:
            for start in range(0, len(pieces), 200_001):
                sock.sendall(pieces[start : start + 200_001])

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        answers = Reader(sock)
        for _ in range(count):
            assert answers.next() == (200, b"GET /health ")
        sender.join(PATIENCE)


def test_bodies_between_pipelined_requests_stay_where_they_are():
    post = b"POST /%d HTTP/1.1\r\nHost: a\r\nContent-Length: 9000\r\n\r\n"
    with echoing() as server, server.socket() as sock:
        sock.sendall(b"".join(post % i + b"\r\n\r\n" * 2250 for i in range(20)) + HEALTH)
        answers = Reader(sock)
        for i in range(20):
            assert answers.next() == (200, b"POST /%d " % i + b"\r\n\r\n" * 2250)
        assert answers.next() == (200, b"GET /health ")


@pytest.mark.parametrize(
    ("first", "more"),
    [
        (b"", HEALTH),
        (b"", b"GET / HTTP/1.1\r\n\r\n"),
        (b"POST / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", b"x"),
        (CHUNKED + b"\r\nffffff\r\n", b"x"),
    ],
)
def test_what_is_queued_behind_a_request_is_bounded(first: bytes, more: bytes):
    """The server stops reading, however much a client sends while its first request is served."""
    with echoing() as server, server.socket() as sock:
        sock.sendall(b"GET /wait HTTP/1.1\r\n\r\n")
        until(lambda: server.seen == ["/wait"])
        sock.settimeout(0.5)
        with pytest.raises(TimeoutError):
            sock.sendall(first + more * ((16 << 20) // len(more)))
        (connection,) = server.connections
        until(lambda: connection.pipeline and not connection.transport.is_reading())
        assert 1 <= len(connection.pipeline) <= PIECE_BYTES // 18
        assert len(connection._unparsed) <= 1 << 19
        assert sum(len(cycle.body) for cycle, _ in connection.pipeline) <= PIECE_BYTES
        assert server.seen == ["/wait"]


def test_a_request_is_told_that_its_client_left_though_another_is_queued():
    with echoing() as server:
        with server.socket() as sock:
            sock.sendall(b"GET /wait HTTP/1.1\r\n\r\n" + HEALTH)
            until(lambda: server.seen == ["/wait"])
        until(lambda: server.left == ["/wait"])
        until(lambda: not server.connections)
        assert server.seen == ["/wait"]


def test_headers_are_not_late_while_an_earlier_request_is_served():
    seconds = 500.0
    with echoing(HttpLimits(header_seconds=seconds), timeout_keep_alive=4 * seconds) as server, server.socket() as sock:
        clock = LoopClock(server.server)
        sock.sendall(b"GET /wait HTTP/1.1\r\n\r\n" + HEALTH[:20])
        until(lambda: server.seen == ["/wait"])
        (connection,) = server.connections
        until(lambda: connection._in_head and connection._timer is not None)
        clock.move_on(seconds)
        until(lambda: connection._timer is None)  # time is up
        server.gate.set()
        answers = Reader(sock)
        assert answers.next() == (200, b"GET /wait ")
        sock.sendall(HEALTH[20:] + HEALTH[:20])
        assert answers.next() == (200, b"GET /health ")
        until(lambda: connection._in_head and connection._timer is not None and connection.idle_since is not None)
        clock.move_on(seconds)
        assert answers.next()[0] == 408  # now nothing else is served
        assert answers.ended()


@pytest.mark.parametrize("bad", [b"no HTTP\r\n\r\n", b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"])
def test_an_error_waits_for_the_answers_to_earlier_requests(bad: bytes):
    with echoing() as server, server.socket() as sock:
        sock.sendall(b"GET /wait HTTP/1.1\r\n\r\n" + HEALTH + bad + HEALTH)
        until(lambda: server.seen == ["/wait"])
        server.gate.set()
        answers = Reader(sock)
        assert [answers.next() for _ in range(2)] == [(200, b"GET /wait "), (200, b"GET /health ")]
        assert answers.next()[0] == 400
        assert answers.ended()
        assert server.seen == ["/wait", "/health"]


def test_empty_lines_do_not_keep_a_connection_open():
    with echoing(timeout_keep_alive=0.4) as server, server.socket() as sock:
        sock.sendall(HEALTH)
        answers = Reader(sock)
        assert answers.next()[0] == 200

        def closed() -> bool:
            try:
                sock.sendall(b"\r\n")
            except OSError:
                return True
            return not server.connections

        until(closed)
        assert answers.ended()


def test_a_closing_connection_whose_client_does_not_read_is_ended():
    """What is left unsent is too little for the transport to pause writing."""

    class Large(EchoServer):
        async def __call__(self, scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
            self.seen.append(scope["path"])
            headers = [(b"connection", b"close")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            (connection,) = self.connections
            while not connection.transport.get_write_buffer_size():
                await send({"type": "http.response.body", "body": b"x" * 8192, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EchoServer, "__call__", Large.__call__)
        with echoing(HttpLimits(stall_seconds=0.2)) as server, socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(HEALTH)
            until(lambda: server.seen)
            until(lambda: not server.connections)


# Upgrade

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
UPGRADE = b"POST /a HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n"
UPGRADE_BODIES = [
    (b"Content-Length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED, SMUGGLED),
    (b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\nX-A: a\r\n\r\n" % (len(SMUGGLED), SMUGGLED), SMUGGLED),
    (b"Content-Length: 0\r\n\r\n", b""),
    (b"\r\n", b""),
]


@pytest.mark.parametrize(("rest", "body"), UPGRADE_BODIES)
def test_an_upgrade_header_is_ignored_wherever_it_is_split(rest: bytes, body: bytes):
    """The body stays the body: it is never taken for a request of its own."""
    request = UPGRADE + rest
    with echoing() as server, server.socket() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answers = Reader(sock)
        for split in (47, 50, len(UPGRADE), len(request) - len(rest) // 2):
            before = server.received
            sock.sendall(request[:split])
            until(lambda before=before, split=split: server.received == before + split)
            sock.sendall(request[split:] + HEALTH)
            assert answers.next() == (200, b"POST /a " + body)
            assert answers.next() == (200, b"GET /health ")
        sock.sendall(HEALTH + request * 3 + HEALTH)
        assert answers.next() == (200, b"GET /health ")
        for _ in range(3):
            assert answers.next() == (200, b"POST /a " + body)
        assert answers.next() == (200, b"GET /health ")
        assert "/smuggled" not in server.seen


# bursts


class Unlisted(set[Any]):
    """A set that cannot be looked through."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("looked at every connection")


class Wire:
    """A transport that only remembers whether it was closed."""

    closed = False

    def abort(self) -> None:
        self.closed = True

    close = abort

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str) -> None:
        return None


def test_a_burst_in_one_iteration_of_the_loop(monkeypatch: pytest.MonkeyPatch):
    """500 newcomers before any socket closes: no more than twice the limit are let in, each idle one gives way once."""
    monkeypatch.setattr(protocol, "IDLE_SECONDS", 0.0)
    state = ServerState()
    state.connections = Unlisted()
    make: Any = bounded_protocol(HttpLimits(max_concurrent=50))
    loop, config = asyncio.new_event_loop(), uvicorn.Config(EchoServer(), log_config=None)
    made, wires = [make(config, state, {}, loop) for _ in range(500)], [Wire() for _ in range(500)]
    for each, wire in zip(made, wires, strict=True):
        each.connection_made(wire)
        assert len(state.connections) <= 100
    assert [wire.closed for wire in wires[:100]] == [True] * 51 + [False] * 49
    assert all(wire.closed for wire in wires[100:])
    for each, wire in zip(made, wires, strict=True):
        if wire.closed:
            each.connection_lost(None)
    assert len(state.connections) == len(made[0].idle) == 49
    assert not made[0].evicted
    loop.close()


@contextmanager
def many_files(count: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= before[1] < count:
        pytest.skip("this machine allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], count), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def burst(port: int, count: int, stack: ExitStack) -> list[socket.socket]:
    """So many connections, begun all at once."""
    made = [stack.enter_context(socket.socket()) for _ in range(count)]
    for sock in made:
        sock.setblocking(False)
        sock.connect_ex(("127.0.0.1", port))
    return made


def test_a_burst_passes_no_limit_and_holds_up_nothing(monkeypatch: pytest.MonkeyPatch, serve: Callable[..., Any]):
    """1,500 connections at once where 200 are idle: at most 400 stay, others are served, and SIGTERM is obeyed."""
    monkeypatch.setattr(run, "http_limits", lambda _: HttpLimits(max_concurrent=200, header_seconds=1000))
    idle = 0.0
    monkeypatch.setattr(protocol, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + idle))
    with many_files(6000), ExitStack() as stack:
        running = serve()
        port, open_now = int(running.url.rpartition(":")[2]), running.server.server_state.connections
        client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))
        burst(port, 200, stack)
        until(lambda: len(open_now) >= 200)
        idle = protocol.IDLE_SECONDS + 0.1
        client.sendall(HEALTH)
        assert read_answer(client)[0] == 200
        burst(port, 1500, stack)
        most, slowest = 0, 0.0
        work = time.pthread_getcpuclockid(running.thread.ident)  # the server's own time: others may have the processor
        for _ in range(100):
            began = time.clock_gettime(work)
            client.sendall(HEALTH)
            assert read_answer(client)[0] == 200
            slowest = max(slowest, time.clock_gettime(work) - began)
            most = max(most, len(open_now))
        assert most <= 400
        assert slowest < 1.0
        burst(port, 500, stack)
        running.server.config.timeout_graceful_shutdown = 1000  # it ends because it waits for none of them
        running.server.handle_exit(signal.SIGTERM, None)
        running.thread.join(PATIENCE)
        assert not running.thread.is_alive()


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="asks Linux for the backlog")
def test_few_are_accepted_at_once_and_many_may_wait(serve: Callable[..., Any]):
    running = serve()
    until(lambda: running.server.started)
    (server,) = running.server.servers
    (listening,) = server.sockets
    (allowed,) = struct.unpack_from("I", listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 28)
    assert allowed == min(BACKLOG, int(Path("/proc/sys/net/core/somaxconn").read_text()))
    assert running.server.config.backlog == ACCEPTED_AT_ONCE
