"""Servers in a test that stand for vLLM, and ours before them: all in this process, each in a thread."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from fake_vllm import FakeVllm
from server_world import until

from outrider.remote.app import create_remote_app
from outrider.remote.front import Front, FrontOptions
from outrider.remote.replica import Replica
from outrider.server.run import listen, make_server
from outrider.server.settings import Settings

NAME = "served"


class FakeServer:
    """A FakeVllm on a port, which can be killed as a process can, and started again on the same port."""

    def __init__(self, fake: FakeVllm | None = None) -> None:
        self.fake = fake or FakeVllm()
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", self.port))
        listening.listen(256)
        self.port = listening.getsockname()[1]
        config = uvicorn.Config(self.fake.app, log_level="critical", timeout_graceful_shutdown=0, lifespan="off")
        self.server, started = uvicorn.Server(config), threading.Event()

        async def run() -> None:
            self.loop = asyncio.get_running_loop()
            self.fake.go = asyncio.Event()
            started.set()
            await self.server.serve(sockets=[listening])

        self.thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
        self.thread.start()
        assert started.wait(10)
        until(lambda: self.server.started)

    def go(self) -> None:
        """Let what waits go on."""
        self.loop.call_soon_threadsafe(self.fake.go.set)

    def kill(self) -> None:
        """End at once, as by kill -9: every connection is reset, and nothing listens."""

        def end() -> None:
            for listening in self.server.servers:
                listening.close()
            for connection in list(self.server.server_state.connections):
                connection.transport.abort()
            self.fake.go.set()
            self.server.should_exit = self.server.force_exit = True

        self.loop.call_soon_threadsafe(end)
        self.thread.join(10)

    def stop(self) -> None:
        if self.thread.is_alive():
            self.kill()


@dataclass
class RemoteRunning:
    """Our server before fakes."""

    fakes: list[FakeServer]
    front: Front
    settings: Settings
    server: uvicorn.Server
    thread: threading.Thread
    url: str
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        headers = {"Authorization": f"Bearer {self.settings.api_keys[0]}"} if self.settings.api_keys else {}
        self.http = httpx.Client(base_url=self.url, timeout=20, headers=headers)

    @property
    def fake(self) -> FakeVllm:
        return self.fakes[0].fake

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def chat(self, content: str, **more: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], **more)

    def states(self) -> list[str]:
        return [replica.state for replica in self.front.pool.replicas]

    def metric(self, line: str) -> str:
        """The value in the line of /metrics that begins so."""
        found = [each for each in self.http.get("/metrics").text.splitlines() if each.startswith(line)]
        assert len(found) == 1, (line, found)
        return found[0].split()[-1]

    def stop(self) -> None:
        self.http.close()
        for fake in self.fakes:
            fake.stop()
        self.front.drain(0)
        self.server.should_exit = True
        self.thread.join(timeout=10)


def start_remote(*fakes: FakeServer, wait: bool = True, max_running: int = 256, **options: Any) -> RemoteRunning:
    """Our server before these; `options` are those of Settings. wait: until all are ready."""
    settings = Settings(served_name=NAME, port=0, **options)
    replicas = [Replica(fake.url) for fake in fakes]
    front = Front(replicas, FrontOptions(max_queue=settings.max_queue, max_running=max_running))
    listening = listen(settings)
    server = make_server(create_remote_app(front, settings), front, settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    running = RemoteRunning(
        list(fakes), front, settings, server, thread, f"http://127.0.0.1:{listening.getsockname()[1]}"
    )
    until(lambda: server.started)
    if wait:
        until(lambda: running.states() == ["ready"] * len(fakes))
    return running


@dataclass
class Stream:
    """A stream as a client reads it."""

    running: RemoteRunning
    body: dict[str, Any]
    path: str = "/v1/completions"
    lines: list[str] = field(default_factory=list[str])
    status: int = 0
    broken: bool = False
    """Whether the connection ended without the end of the response."""

    def read(self) -> Stream:
        """All of it, in this thread."""
        try:
            url, body = self.running.url + self.path, self.body | {"stream": True}
            with httpx.stream("POST", url, json=body, timeout=30) as answer:
                self.status = answer.status_code
                for line in answer.iter_lines():
                    self.lines += [line] if line else []
        except httpx.HTTPError:
            self.broken = True
        return self

    def begin(self) -> Stream:
        """Read it in a thread of its own."""
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()
        return self

    def end(self) -> Stream:
        self.thread.join(30)
        assert not self.thread.is_alive()
        return self

    @property
    def chunks(self) -> list[dict[str, Any]]:
        data = [line.removeprefix("data: ") for line in self.lines if line.startswith("data: ")]
        return [json.loads(each) for each in data if each != "[DONE]"]

    @property
    def text(self) -> str:
        return "".join(choice.get("text", "") for chunk in self.chunks for choice in chunk.get("choices", ()))

    @property
    def error(self) -> dict[str, Any] | None:
        """The error of its last event; None where it is complete."""
        if self.lines and self.lines[-1] == "data: [DONE]":
            return None
        return self.chunks[-1]["error"]


def running_world() -> Iterator[Any]:
    """For a fixture: makes servers that are stopped at the test's end."""
    made: list[RemoteRunning] = []

    def make(*fakes: FakeServer | FakeVllm, count: int = 1, **options: Any) -> RemoteRunning:
        servers = [each if isinstance(each, FakeServer) else FakeServer(each) for each in fakes]
        made.append(start_remote(*(servers or [FakeServer() for _ in range(count)]), **options))
        return made[-1]

    yield make
    for running in made:
        running.stop()
