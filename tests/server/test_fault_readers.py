"""Clients that ask and do not read: others go on, nothing piles up without end, and in the end they are cut off."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from operation_world import OTHER_KEY, Running, post, serving
from server_world import PATIENCE, LoopClock, until

from outrider.server.http.limits import HttpLimits

ASK = {"prompt": "ab", "max_tokens": 120, "ignore_eos": True, "n": 8, "logprobs": 20, "include_provenance": True}
"""About a megabyte of answer: more than the sockets of these tests hold."""
STALL = 100.0
"""Seconds of the server's clock, which is moved by hand: on a busy machine even those who read may take long."""
ESTABLISHED = "01"
READERS = 4
HELD = 64 << 20
"""More than the process may grow by: the answers of all of them, as events and as bytes, a few times over."""


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    create = socket.create_server

    def small(*args: Any, **options: Any) -> socket.socket:
        """Connections inherit what the system holds for their readers; by default that is megabytes."""
        listening = create(*args, **options)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 << 10)
        return listening

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_server", small)
        with serving(protocol=HttpLimits(stall_seconds=STALL)) as made:
            yield made


@pytest.fixture(scope="module")
def clock(running: Running) -> LoopClock:
    return LoopClock(running.server)


def connect(running: Running, *, stream: bool) -> socket.socket:
    """A client that has asked, with as small a window as the system allows."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(PATIENCE)
    client.connect(("127.0.0.1", running.port))
    client.sendall(post(json.dumps(ASK | {"stream": stream}).encode()))
    return client


def connected(running: Running, client: socket.socket) -> bool:
    """Whether the server's end of a connection stands, as the system sees it."""
    _, port = client.getsockname()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, *_ = line.split()
        if (int(local.split(":")[1], 16), int(remote.split(":")[1], 16)) == (running.port, port):
            return state == ESTABLISHED
    return False


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks at connections as Linux tells of them")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_one_that_never_reads_is_cut_off_and_others_go_on(running: Running, clock: LoopClock, stream: bool):
    with running.client(OTHER_KEY) as http:
        alone = http.post("/v1/completions", json={"prompt": "xy", "seed": 3, "max_tokens": 20}).json()
        before, clients = resident(), [connect(running, stream=stream) for _ in range(READERS)]
        until(lambda: running.engine_thread.snapshot().running > 0)
        beside = http.post("/v1/completions", json={"prompt": "xy", "seed": 3, "max_tokens": 20}).json()
        assert any(connected(running, client) for client in clients)
        assert beside["choices"][0]["text"] == alone["choices"][0]["text"]

    def cut_off() -> bool:
        clock.move_on(STALL)
        return not any(connected(running, client) for client in clients)

    until(cut_off)
    assert resident() - before < HELD
    until(lambda: running.engine_thread.snapshot().pages_used == 0)
    with running.client(OTHER_KEY) as http:  # the connection of the one before was idle for long
        assert http.get("/health").status_code == 200
    running.engine_thread.engine.llm.engine.check()
    for client in clients:
        client.close()


def test_one_that_reads_slowly_gets_all_of_it(running: Running, clock: LoopClock):
    """It takes far longer than the limit, a little at a time."""
    with connect(running, stream=True) as client:
        began, data = clock.ahead, b""
        while not data.endswith(b"0\r\n\r\n"):
            piece = client.recv(1 << 14)
            assert piece, "cut off"
            data += piece
            if clock.ahead - began < 3 * STALL:
                clock.move_on(STALL / 50)
        assert b"data: [DONE]" in data
        assert clock.ahead - began > 2 * STALL
    until(lambda: running.engine_thread.snapshot().pages_used == 0)
