"""The handle of a worker process: starts it, sends it grammars, and learns what compiling them takes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from weakref import finalize

from outrider.core.errors import RequestError
from outrider.grammar import worker

START_SECONDS = 60.0  # for a worker to read a large vocabulary on a busy machine
RETRY_SECONDS = 5  # after which a grammar refused for lack of a worker may be sent again

_INHERITED = ("PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # nothing else: it may hold keys


class CompilerUnavailableError(RequestError):
    """No worker can compile a grammar now. The grammar may be right: send it again after `retry_after` seconds."""

    retry_after = RETRY_SECONDS


class GrammarCostError(RequestError):
    """Compiling a grammar takes more time or memory than is allowed."""


@dataclass(frozen=True, slots=True)
class CompileJob:
    """A grammar to compile, and the limits on compiling it."""

    grammar: str
    """As llguidance takes it."""
    fuel: int
    states: int
    seconds: float
    """Processor time; wall-clock time may be three times as much."""
    bytes: int


@dataclass(frozen=True, slots=True)
class CompileOutcome:
    """What compiling a grammar took, or why it failed."""

    error: str
    """llguidance's message; empty where the grammar is right."""
    seconds: float
    bytes: int


@dataclass(slots=True)
class _RunningWorker:
    """A process, and the jobs that wait for their outcome."""

    process: subprocess.Popen[bytes]
    waiting: dict[int, SimpleQueue[dict[str, Any] | None]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held to write a line."""
    dead: bool = False

    def read(self) -> None:
        """Hand outcomes to those that wait, until the process ends; then reap it. Runs in a thread of its own."""
        if self.process.stdout is None:
            return
        for line in self.process.stdout:
            outcome = json.loads(line)
            waiting = self.waiting.pop(outcome["id"], None)
            if waiting is not None:
                waiting.put(outcome)
        self.dead = True
        self.process.wait()
        for job_id in list(self.waiting):
            self.waiting.pop(job_id).put(None)

    def write(self, line: bytes) -> None:
        if self.process.stdin is None:
            return
        with self.lock:
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def close(self) -> None:
        """Let the process end. Its children, if any are left, end with it."""
        self.dead = True
        with suppress(OSError), self.lock:
            if self.process.stdin is not None:
                self.process.stdin.close()


class WorkerProcess:
    """One tokenizer's worker: started when first needed, and again where it died. May be used by several threads."""

    def __init__(self, vocabulary: Mapping[str, Any]) -> None:
        """vocabulary: as `worker.load_tokenizer` takes it."""
        self._vocabulary = json.dumps(vocabulary).encode() + b"\n"
        self._ids = count()
        self._lock = threading.Lock()
        self._running: _RunningWorker | None = None

    def start(self) -> _RunningWorker:
        """The running process. Raises CompilerUnavailableError where none can be started."""
        with self._lock:
            if self._running is None or self._running.dead:
                self._running = self._start()
                finalize(self, self._running.close)
            return self._running

    def compile(self, job: CompileJob) -> CompileOutcome:
        """Compile in a process that is killed at the job's bounds. Raises GrammarCostError where it was."""
        outcome = self._send(job) or self._send(job)  # a worker that somebody killed is replaced
        if outcome is None:
            raise CompilerUnavailableError("the process that compiles grammars was killed; try again")
        return _read_outcome(outcome, job)

    def _send(self, job: CompileJob) -> dict[str, Any] | None:
        """The worker's answer; None where it died."""
        running, job_id = self.start(), next(self._ids)
        waiting: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        running.waiting[job_id] = waiting
        try:
            running.write(json.dumps({"id": job_id, **asdict(job)}).encode() + b"\n")
            return waiting.get(timeout=START_SECONDS + 3 * job.seconds)
        except OSError:  # it died before it read the job
            running.dead = True
        except Empty:
            running.process.kill()
            raise CompilerUnavailableError("the process that compiles grammars does not answer; try again") from None
        finally:
            running.waiting.pop(job_id, None)
        return None

    def _start(self) -> _RunningWorker:
        if sys.platform == "win32":
            raise RequestError("structured output is not offered on Windows: grammars are compiled in forked processes")
        env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        env["PYTHONPATH"] = os.pathsep.join(each for each in sys.path if each)
        try:
            process = subprocess.Popen(  # noqa: S603 (our own arguments, no shell)
                [sys.executable, "-P", str(Path(worker.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # Rust writes there before it aborts
                env=env,
                start_new_session=True,  # Ctrl-C in a terminal is for the parent
            )
            running = _RunningWorker(process)
            threading.Thread(target=running.read, name="grammar-worker", daemon=True).start()
            running.write(self._vocabulary)
        except (OSError, RuntimeError) as error:
            message = f"no process to compile grammars can be started ({error}); try again"
            raise CompilerUnavailableError(message) from error
        return running


def _read_outcome(outcome: Mapping[str, Any], job: CompileJob) -> CompileOutcome:
    status = outcome["status"]
    if status == 0:
        return CompileOutcome(outcome["error"], outcome["seconds"], outcome["bytes"])
    if -status in (signal.SIGPROF, signal.SIGALRM):
        raise GrammarCostError(f"took more than {job.seconds:g} s to compile")
    if status == worker.OUT_OF_MEMORY or -status in (signal.SIGABRT, signal.SIGKILL, signal.SIGSEGV):
        raise GrammarCostError(f"took more than {job.bytes >> 20} MB of memory to compile")
    raise CompilerUnavailableError(f"the process that compiles grammars failed with status {status}; try again")
