"""Where the server listens, and what its log says when it stops."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from typing import Any

import pytest

from outrider.core.errors import ConfigError
from outrider.server import run
from outrider.server.run import DrainingServer, listen
from outrider.server.settings import Settings


def test_an_address_that_cannot_be_listened_on_says_what_to_choose():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            listen(Settings(served_name="x", port=port))
    assert str(caught.value) == (
        f"cannot listen on 127.0.0.1 port {port}: Address already in use; choose another --port"
    )
    for host in ("no.such.host.invalid", "192.0.2.1"):  # the second is reserved for documents: no machine has it
        with pytest.raises(ConfigError, match=r"[a-z]; choose another --host$"):
            listen(Settings(served_name="x", host=host, port=0, api_keys=("k" * 32,)))


class Stopping:
    """A backend with open requests."""

    state, was_ready = "draining", True

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.given: list[float] = []

    def drain(self, timeout: float) -> None:
        self.given.append(timeout)


@pytest.mark.parametrize(("sig", "seconds"), [(signal.SIGTERM, 30.0), (signal.SIGINT, 0)])
def test_the_log_says_how_long_open_requests_have(sig: signal.Signals, seconds: float, monkeypatch: pytest.MonkeyPatch):
    logged: list[dict[str, Any]] = []
    monkeypatch.setattr(run, "log_event", lambda event, **fields: logged.append({event: fields}))
    backend: Any = Stopping()
    server = DrainingServer(run.uvicorn.Config(lambda: None), backend, 30.0)
    server.handle_exit(sig, None)
    asyncio.run(server.on_tick(1))
    assert backend.given == [seconds]
    assert logged == [{"drain": {"seconds": seconds}}]
