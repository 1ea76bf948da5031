"""Listening: uvicorn with the engine's thread beside it, and an end that loses nobody's answer."""

from __future__ import annotations

import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from outrider.core.errors import ConfigError
from outrider.server.logs import log
from outrider.server.operation import uvicorn_options
from outrider.server.settings import Settings
from outrider.server.worker import Worker

MIN_FILES = 4096  # twice as many as there are connections
CLOSING_SECONDS = 5  # what connections get to take the last of their answers


class Server(uvicorn.Server):
    """Goes on answering while open requests are drained, then leaves with exit code 0."""

    def __init__(self, config: uvicorn.Config, worker: Worker, drain_timeout: float) -> None:
        super().__init__(config)
        self.worker, self.drain_timeout = worker, drain_timeout
        self._told_to_end = self._drain_told = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; the next one, or Ctrl-C, ends the wait. None is raised again: the exit code is 0."""
        at_once = self._told_to_end or sig == signal.SIGINT
        self._told_to_end = True
        self.worker.drain(0 if at_once else self.drain_timeout)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second. Ends the server when the worker is done, or has no model and will get none."""
        if self.worker.state == "draining" and not self._drain_told:
            self._drain_told = True
            log("drain", seconds=self.drain_timeout)
        stopped, served = self.worker.stopped.is_set(), self.worker.served
        if (stopped and not served) or (self._told_to_end and (stopped or not served)):
            self.should_exit = True
        return await super().on_tick(counter)


def listen(settings: Settings) -> socket.socket:
    """The socket to serve on; its own name tells the port where any would do. ConfigError where it cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listening = socket.create_server((settings.host.strip("[]"), settings.port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}; choose another --port"
        ) from error
    # Connections inherit it. asyncio sets it only on sockets that name their protocol, which these do not, and
    # without it the body of a short answer waits 40 ms behind its headers for the client's acknowledgement.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def server(app: FastAPI, worker: Worker, settings: Settings) -> Server:
    """A server that is ready to run."""
    options = uvicorn_options(settings)
    config = uvicorn.Config(app, timeout_graceful_shutdown=CLOSING_SECONDS, **options)
    return Server(config, worker, settings.drain_timeout)


def allow_files() -> None:
    """Let this process open as many files as its connections may need, as far as the machine lets it."""
    try:
        import resource
    except ImportError:  # not on Windows, which has no such limit
        return
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= now < MIN_FILES and (most < 0 or now < most):
        resource.setrlimit(resource.RLIMIT_NOFILE, (MIN_FILES if most < 0 else min(MIN_FILES, most), most))


def run(app: FastAPI, worker: Worker, settings: Settings, listening: socket.socket) -> None:
    """Serve until told to stop. Raises what kept the model from being loaded."""
    allow_files()
    worker.start()
    server(app, worker, settings).run(sockets=[listening])
    if worker.failure is not None and not worker.served:
        raise worker.failure
