"""The worker process: small, replaced when it dies, and gone when its parent is, whatever it is doing then."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.core.errors import RequestError
from outrider.grammar import CompilerUnavailableError, GrammarCostError, GrammarSpec, compile_constraint, worker
from outrider.grammar import compile as compiling
from outrider.testing.toy import ByteTokenizer

ENDLESS = GrammarSpec.json_schema({"type": "integer", "multipleOf": 100_000_007})
PROC = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are read from /proc")


def pid_of(tokenizer: ByteTokenizer) -> int:
    return compiling._cache_of(tokenizer).worker.start().process.pid


def children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(true: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def test_it_imports_nothing_large():
    code = (
        f"import runpy, sys; runpy.run_path({worker.__file__!r}); import llguidance; "
        "print([name for name in ('torch', 'numpy', 'outrider') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@PROC
def test_nothing_is_left_of_a_grammar_that_was_killed(monkeypatch: pytest.MonkeyPatch):
    """Its thread went on for minutes and took 3 GB, after the refusal."""
    monkeypatch.setattr(compiling, "MAX_COMPILE_SECONDS", 0.2)
    tokenizer = ByteTokenizer()
    pid = pid_of(tokenizer)
    threads = threading.active_count()
    for _ in range(3):
        with pytest.raises(GrammarCostError):
            compile_constraint(ENDLESS, tokenizer)
        assert not children(pid)
    assert threading.active_count() == threads
    assert pid_of(tokenizer) == pid  # the vocabulary is not read again


def test_one_that_was_killed_is_replaced():
    tokenizer = ByteTokenizer()
    first = pid_of(tokenizer)
    os.kill(first, signal.SIGKILL)
    compile_constraint(GrammarSpec.regex("a"), tokenizer)
    assert pid_of(tokenizer) != first


@PROC
def test_it_ends_with_its_tokenizer():
    tokenizer = ByteTokenizer()
    compile_constraint(GrammarSpec.regex("a"), tokenizer)
    pid = pid_of(tokenizer)
    del tokenizer
    gc.collect()
    until(lambda: not Path(f"/proc/{pid}").exists())  # reaped, too


@PROC
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_parent_while_it_compiles(how: signal.Signals):
    code = (
        "import threading\n"
        "from outrider.grammar import GrammarSpec, compile_constraint\n"
        "from outrider.grammar import compile as compiling\n"
        "from outrider.testing.toy import ByteTokenizer\n"
        "compiling.MAX_COMPILE_SECONDS, compiling.MAX_COMPILE_BYTES = 60.0, 1 << 32\n"
        "tokenizer = ByteTokenizer()\n"
        "print(compiling._cache_of(tokenizer).worker.start().process.pid, flush=True)\n"
        f"compile_constraint(GrammarSpec.json_schema({ENDLESS.source}), tokenizer)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        until(lambda: children(pid))
        (child,) = children(pid)
        parent.send_signal(how)
    until(lambda: not alive(pid) and not alive(child))


def test_without_processes_the_message_says_so(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(CompilerUnavailableError, match="can be started"):
        compile_constraint(GrammarSpec.regex("a"), ByteTokenizer())
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(RequestError, match="Windows"):
        compile_constraint(GrammarSpec.regex("a"), ByteTokenizer())


def test_it_does_not_inherit_the_servers_keys(monkeypatch: pytest.MonkeyPatch):
    if not Path("/proc/self/environ").exists():
        pytest.skip("the environment is read from /proc")
    monkeypatch.setenv("OUTRIDER_API_KEY", "a-secret-key")
    tokenizer = ByteTokenizer()
    compile_constraint(GrammarSpec.regex("a"), tokenizer)
    assert b"a-secret-key" not in Path(f"/proc/{pid_of(tokenizer)}/environ").read_bytes()


def test_whatever_llguidance_raises_is_a_refusal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiling, "llguidance_grammar", lambda _: '{"grammars": [{"name": 5}]}')
    with pytest.raises(RequestError, match=r"^the regex is not valid: ") as caught:
        compile_constraint(GrammarSpec.regex("a"), ByteTokenizer())
    assert not isinstance(caught.value, CompilerUnavailableError)
