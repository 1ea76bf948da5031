"""Running a server: uvicorn, the backend behind it, and a shutdown that finishes open requests."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from outrider.core.errors import ConfigError, reason
from outrider.server.app import http_limits
from outrider.server.http.protocol import bounded_protocol
from outrider.server.ops.logs import log_event
from outrider.server.queue.backend import Backend
from outrider.server.settings import Settings

BACKLOG = 1024  # connections the system keeps until they are accepted
ACCEPTED_AT_ONCE = 64  # in one iteration of the event loop, so that a burst does not hold up everything else
MIN_OPEN_FILES = 4096  # twice the max number of connections
MAKING_SECONDS = 0.1  # from accepting a connection to creating its protocol
CLOSING_SECONDS = 5  # how long clients may take to read the end of their responses


class DrainingServer(uvicorn.Server):
    """Keeps serving while open requests are drained, then exits with code 0."""

    def __init__(self, config: uvicorn.Config, backend: Backend, drain_timeout: float) -> None:
        super().__init__(config)
        self.backend, self.drain_timeout = backend, drain_timeout
        self._exiting = self._drain_logged = False
        self._drain_seconds = drain_timeout

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start serving. asyncio sets the backlog to the number it accepts at once, so that it is set again here."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, and close every connection: also those accepted a moment ago, which are still being made."""
        for server in self.servers:
            server.close()
        await asyncio.sleep(MAKING_SECONDS)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; the next one, or Ctrl-C, ends the wait. No signal is raised again: exit code 0."""
        at_once = self._exiting or sig == signal.SIGINT
        self._exiting = True
        self._drain_seconds = 0 if at_once else self.drain_timeout
        self.backend.drain(self._drain_seconds)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second. Exits if the backend stopped before it was ready; after a signal, if it stopped or
        was never ready."""
        if self.backend.state == "draining" and not self._drain_logged:
            self._drain_logged = True
            log_event("drain", seconds=self._drain_seconds)
        stopped, was_ready = self.backend.stopped.is_set(), self.backend.was_ready
        if (stopped and not was_ready) or (self._exiting and (stopped or not was_ready)):
            self.should_exit = True
        return await super().on_tick(counter)


def listen(settings: Settings) -> socket.socket:
    """The socket to serve on; with port 0 `getsockname` tells the port. ConfigError where it cannot be opened."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listening = socket.create_server((settings.host.strip("[]"), settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        told = reason(error).partition(" (while")[0]  # Python adds the address to what the system says
        of_host = (error.errno or 0) < 0 or error.errno == errno.EADDRNOTAVAIL  # below 0: the name is not known
        fix = f"choose another {'--host' if of_host else '--port'}"
        raise ConfigError(f"cannot listen on {settings.host} port {settings.port}: {told}; {fix}") from error
    # Connections inherit it. asyncio sets it only on sockets that name their protocol, which these do not; without
    # it the body of a short response waits 40 ms for the client to acknowledge its headers.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def uvicorn_options(settings: Settings) -> dict[str, Any]:
    """Options for `uvicorn.Config`."""
    return {
        "http": bounded_protocol(http_limits(settings)),
        "ws": "none",
        "access_log": False,
        "log_config": None,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": 30,
    }


def make_server(app: FastAPI, backend: Backend, settings: Settings) -> DrainingServer:
    """A server that is ready to run."""
    options: dict[str, Any] = uvicorn_options(settings) | {"backlog": ACCEPTED_AT_ONCE}
    config = uvicorn.Config(app, timeout_graceful_shutdown=CLOSING_SECONDS, **options)
    return DrainingServer(config, backend, settings.drain_timeout)


def raise_file_limit() -> None:
    """Raise this process's limit of open files to what its connections may need, as far as the system allows."""
    try:
        import resource
    except ImportError:  # not on Windows, which has no such limit
        return
    now, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= now < MIN_OPEN_FILES and (allowed < 0 or now < allowed):
        wanted = MIN_OPEN_FILES if allowed < 0 else min(MIN_OPEN_FILES, allowed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, allowed))


def run_server(app: FastAPI, backend: Backend, settings: Settings, listening: socket.socket) -> None:
    """Serve until stopped. Raises the error where the model could not be loaded."""
    raise_file_limit()
    backend.start()
    make_server(app, backend, settings).run(sockets=[listening])
    if backend.failure is not None and not backend.was_ready:
        raise backend.failure
