"""vLLM's own server as a child process: started, its output logged, started again when it ends."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import re
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress

from outrider.core.errors import ConfigError
from outrider.remote.replica import Replica
from outrider.server.ops.logs import log_event

STOP_SECONDS = 10.0
"""How long it gets after SIGTERM."""
FIRST_WAIT, MAX_WAIT = 1.0, 60.0
"""Seconds before it is started again: doubled each time, until it has run for as long as the longest."""
LAST_LINES = 12
"""Of its output, told where it ends before it was ready."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class EngineChild:
    """Runs `command --host 127.0.0.1 --port N` in a process group of its own."""

    def __init__(self, command: Seq[str], replica: Replica, environment: Mapping[str, str] | None = None) -> None:
        """replica: its url is set to the child's address before each start. environment: added to this process's."""
        self.command, self.replica = list(command), replica
        self.environment = {**os.environ, **(environment or {})}
        self.restarts = 0
        self._process: asyncio.subprocess.Process | None = None
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._task: asyncio.Task[None] | None = None

    def start(self, on_exit: Callable[[Replica, Exception], bool]) -> None:
        """on_exit: called with the replica and the error when it ends; returns whether to start it again."""
        self._task = asyncio.create_task(self._keep(on_exit))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            _signal_group(process.pid, signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await process.wait()
        _signal_group(process.pid, signal.SIGKILL)  # also what it left behind
        await process.wait()

    async def _keep(self, on_exit: Callable[[Replica, Exception], bool]) -> None:
        wait = FIRST_WAIT
        while True:
            began = time.monotonic()
            error = await self._run()
            if not on_exit(self.replica, error):
                return
            wait = FIRST_WAIT if time.monotonic() - began > MAX_WAIT else wait
            await asyncio.sleep(wait)
            wait = min(MAX_WAIT, 2 * wait)
            self.restarts += 1

    async def _run(self) -> Exception:
        """Run it until it ends; returns what there is to say of that."""
        port = free_port()
        self.replica.url = f"http://127.0.0.1:{port}"
        command = [*self.command, "--host", "127.0.0.1", "--port", str(port)]
        log_event("engine start", command=" ".join(command))
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                limit=1 << 20,
                env=self.environment,
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        except OSError as error:
            return ConfigError(f"{self.command[0]} cannot be started: {error.strerror or error}; is vLLM installed?")
        self._process = process
        await asyncio.gather(self._log_output(process), process.wait())
        _signal_group(process.pid, signal.SIGKILL)  # its workers, where it was killed alone
        said = " | ".join(self._lines)
        return ConfigError(f"{self.command[0]} has ended with code {process.returncode}; it said last: {said}")

    async def _log_output(self, process: asyncio.subprocess.Process) -> None:
        """Write its lines to the log until it ends. Its workers hold the pipe too, and may outlive it."""
        reading = asyncio.ensure_future(self._read_lines(process))
        ended = asyncio.ensure_future(process.wait())
        await asyncio.wait({reading, ended}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({reading}, timeout=0.2)
        reading.cancel()
        await asyncio.gather(reading, ended, return_exceptions=True)

    async def _read_lines(self, process: asyncio.subprocess.Process) -> None:
        stream = process.stdout
        while stream is not None:
            try:
                raw = await stream.readline()
            except ValueError:  # a line of a megabyte
                continue
            if not raw:
                return
            line = _COLOUR.sub("", raw.decode(errors="replace")).rstrip()
            if line:
                self._lines.append(line[-300:])
                level = logging.WARNING if re.search(r"\b(WARNING|ERROR|CRITICAL|Traceback)\b", line) else logging.INFO
                log_event("engine", level, line=line)


def free_port() -> int:
    """A port of the loopback address that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


def _die_with_parent() -> None:
    """Runs in the child before the command does: Linux ends it when this server is killed."""
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGTERM)
