"""The process in which every grammar is compiled first, so that a malicious grammar cannot harm the server.

Runs as a script. Imports neither torch nor the rest of the package, so that it is small and starts
quickly. The first line of stdin is the vocabulary, each other line a job; each line of stdout is
the outcome of one job. Each job is compiled in a forked child, which the kernel ends when its time
or memory is spent. The process ends when stdin does, also where its parent was killed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from typing import Any, NoReturn

OUT_OF_MEMORY = 3  # the exit status of a child that needs more memory than allowed
_WATCH_SECONDS = 0.02


def load_tokenizer(vocabulary: Mapping[str, Any]) -> Any:
    """llguidance's LLTokenizer of a tokenizer.json (`json`), or of a list of bytes as latin-1 texts (`tokens`)."""
    import llguidance

    ends = vocabulary["ends"]
    if "json" in vocabulary:
        return llguidance.LLTokenizer(vocabulary["json"], eos_token=ends)
    tokens = [token.encode("latin-1") for token in vocabulary["tokens"]]
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_TokenBytes(tokens, ends)), eos_token=ends)


def build_matcher(tokenizer: Any, grammar: str, fuel: int, states: int) -> Any:
    """An LLMatcher at the grammar's beginning, with its first bitmask computed already. It may hold an error."""
    import llguidance

    limits = llguidance.LLParserLimits(initial_lexer_fuel=fuel, max_lexer_states=states, verbose_errors=False)
    start = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    start.compute_bitmask()
    return start


class _TokenBytes:
    """A list of bytes as llguidance's TokenizerWrapper takes it: greedy, longest token first."""

    bos_token_id = None

    def __init__(self, tokens: Iterable[bytes], ends: Seq[int]) -> None:
        known = list(tokens)
        known += [b""] * (ends[-1] + 1 - len(known))
        # a token without bytes is never text; as a special token it is not allowed
        self.special_token_ids = sorted({*ends, *(i for i, token in enumerate(known) if not token)})
        for i in self.special_token_ids:
            known[i] = b"<special %d>" % i
        self.tokens = known
        self.eos_token_id = ends[0]
        special = set(self.special_token_ids)
        plain = [i for i in range(len(known)) if i not in special]
        self._by_bytes = {known[i]: i for i in reversed(plain)}  # the lowest id of equal tokens
        self._longest = max(map(len, self._by_bytes), default=0)

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        out: list[int] = []
        at = 0
        while at < len(data):
            for width in range(self._longest, 0, -1):
                token = self._by_bytes.get(data[at : at + width])
                if token is not None:
                    out.append(token)
                    break
            else:
                width = 1  # no token has this byte: it is left out
            at += width
        return out


class _Children:
    """The jobs being compiled: a child process for each, and the pipe that brings its outcome."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._jobs: dict[int, tuple[int, int]] = {}
        """By the pipe's file descriptor: the child's process id, and the job's id."""

    @property
    def pipes(self) -> list[int]:
        return list(self._jobs)

    def start(self, job: Mapping[str, Any]) -> None:
        """Compile a job in a new child."""
        outcome, write_end = os.pipe()
        child = os.fork()
        if not child:
            _compile_and_exit(self._tokenizer, job, write_end)
        os.close(write_end)
        self._jobs[outcome] = (child, job["id"])

    def finish(self, pipe: int) -> dict[str, Any]:
        """The outcome of a child that has written it, or has died."""
        child, job_id = self._jobs.pop(pipe)
        with open(pipe, "rb") as outcome:
            written = outcome.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return {"id": job_id, "status": status, **(json.loads(written) if status == 0 else {})}

    def kill(self) -> None:
        for child, _ in self._jobs.values():
            os.kill(child, signal.SIGKILL)


def _compile_and_exit(tokenizer: Any, job: Mapping[str, Any], pipe: int) -> NoReturn:
    """Compile in a thread, whose stack is as large as that of the server's thread that compiles next."""
    before = _peak_bytes()

    def run() -> None:
        began = time.process_time()
        try:
            error = build_matcher(tokenizer, job["grammar"], job["fuel"], job["states"]).get_error()
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except BaseException as raised:  # a panic of llguidance is no Exception
            error = str(raised) or type(raised).__name__
        took = {"seconds": time.process_time() - began, "bytes": _peak_bytes() - before}
        if took["bytes"] > job["bytes"]:
            os._exit(OUT_OF_MEMORY)
        os.write(pipe, json.dumps({"error": error[:4096], **took}).encode())
        os._exit(0)

    try:
        _limit(job["seconds"], before + job["bytes"])
        threading.Thread(target=run, daemon=True).start()
        while _peak_bytes() <= before + job["bytes"]:  # llguidance releases the interpreter's lock while it compiles
            time.sleep(_WATCH_SECONDS)
        os._exit(OUT_OF_MEMORY)
    finally:
        os._exit(1)


def _limit(seconds: float, max_bytes: int) -> None:
    """Let the kernel end this process after this much processor time, or three times as much wall-clock time.

    Where the kernel limits memory too, that is a second limit.
    """
    import resource

    for timer, number, limit in (
        (signal.ITIMER_PROF, signal.SIGPROF, seconds),
        (signal.ITIMER_REAL, signal.SIGALRM, 3 * seconds),
    ):
        signal.signal(number, signal.SIG_DFL)
        signal.setitimer(timer, limit)
    with suppress(OSError, ValueError):  # macOS
        resource.setrlimit(resource.RLIMIT_DATA, (2 * max_bytes, 2 * max_bytes))


def _peak_bytes() -> int:
    """The most memory this process has held."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _lines(data: bytearray) -> Iterator[bytes]:
    """Remove the complete lines from the data."""
    while (end := data.find(b"\n")) >= 0:
        line = bytes(data[:end])
        del data[: end + 1]
        yield line


def main() -> None:
    """Serve until stdin ends."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    data = bytearray()
    while b"\n" not in data:
        data += _read()
    vocabulary, _, data = data.partition(b"\n")
    children = _Children(load_tokenizer(json.loads(vocabulary)))
    try:
        while True:
            for line in _lines(data):
                children.start(json.loads(line))
            ready: list[int] = select.select([0, *children.pipes], [], [])[0]
            for pipe in ready:
                if pipe:
                    os.write(1, json.dumps(children.finish(pipe)).encode() + b"\n")
            data += _read() if 0 in ready else b""
    finally:
        children.kill()


def _read() -> bytes:
    """What has arrived on stdin. Ends the process where stdin has ended."""
    read = os.read(0, 1 << 20)
    return read or sys.exit()


if __name__ == "__main__":
    main()
