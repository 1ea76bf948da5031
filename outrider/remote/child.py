"""vLLM's own server as a child process: started, its output logged, started again when it ends."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress

from outrider.core.errors import ConfigError
from outrider.remote.replica import Replica
from outrider.server.ops.logs import log_event

STOP_SECONDS = 10.0
"""How long the process may take to end after SIGTERM."""
FIRST_WAIT, MAX_WAIT = 1.0, 60.0
"""Seconds before a restart: doubled from the first value up to the second; a run longer than MAX_WAIT resets it."""
OUTPUT_SECONDS = 2.0
"""How long reading the rest of its output may take once the process has ended."""
LAST_LINES = 12
"""The number of last lines of output that are quoted when the process has ended."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class EngineChild:
    """Runs `command --host 127.0.0.1 --port N` in a process group of its own."""

    def __init__(self, command: Seq[str], replica: Replica, environment: Mapping[str, str] | None = None) -> None:
        """replica: its url is set to the child's address before each start. environment: added to this process's."""
        self.command, self.replica = list(command), replica
        self.environment = {**os.environ, **(environment or {})}
        self.restarts = 0
        self._process: subprocess.Popen[bytes] | None = None
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
        if process is not None:
            _signal_group(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, STOP_SECONDS)
            _signal_group(process.pid, signal.SIGKILL)  # also the processes it left behind
            await asyncio.to_thread(process.wait)

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
        """Run the process until it ends; returns the error that says how."""
        port = free_port()
        self.replica.url = f"http://127.0.0.1:{port}"
        command = [*self.command, "--host", "127.0.0.1", "--port", str(port)]
        log_event("engine start", command=" ".join(command))
        try:
            process = subprocess.Popen(  # noqa: S603 - the operator's own command
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        except OSError as error:
            return ConfigError(f"{self.command[0]} cannot be started: {error.strerror or error}; is vLLM installed?")
        self._process = process
        reading = threading.Thread(target=self._log_output, args=(process,), daemon=True)
        reading.start()
        # Not asyncio's own processes: their wait lasts until the output is closed, which the engine's workers hold too.
        await asyncio.to_thread(process.wait)
        _signal_group(process.pid, signal.SIGKILL)  # its workers, where only the process itself was killed
        await asyncio.to_thread(reading.join, OUTPUT_SECONDS)
        said = " | ".join(self._lines)
        return ConfigError(f"{self.command[0]} has ended with code {process.returncode}; it said last: {said}")

    def _log_output(self, process: subprocess.Popen[bytes]) -> None:
        """Write its lines to the log until its output ends. Runs in a thread of its own."""
        for raw in process.stdout or ():
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
    """Runs in the child before the command: lets Linux send it SIGTERM when this server dies."""
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGTERM)
