"""Collection in several processes on one device: each has an engine and writes shards of its own."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
from collections.abc import Callable
from collections.abc import Sequence as Seq
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from outrider.core.errors import ConfigError, OutriderError
from outrider.train.collect import CollectConfig, Report, Todo, answer_all, begin, load_engine
from outrider.train.corpus import CorpusWriter
from outrider.train.files import DiskError
from outrider.train.prompts import ChatPrompt

POLL_S = 0.5
STOP_S = 30.0  # how long a worker may take to write what it has
ERRORS: dict[str, type[OutriderError]] = {"ConfigError": ConfigError, "DiskError": DiskError}


def collect(
    target: str,
    prompts: list[ChatPrompt],
    out: Path,
    config: CollectConfig,
    started: Callable[[int, int], None],
    report: Report,
) -> None:
    """Collect answers to all prompts into `out`, continuing where an earlier run was interrupted.

    started: called with the number of prompts and of those that are answered already. A single worker is this process
    itself; of several, each is a process that this one waits for.
    """
    config = config.for_device()
    todo = begin(target, prompts, out, config)
    started(len(prompts), len(prompts) - len(todo))
    if not todo:
        return
    if config.workers == 1:
        with load_engine(target, config) as llm:
            answer_all(llm, todo, CorpusWriter(out, "0"), config, report)
        return
    context = multiprocessing.get_context("spawn")
    messages = context.Queue()
    workers = [
        context.Process(
            target=_work, args=(i, target, todo[i :: config.workers], out, config, messages, os.getpid()), daemon=True
        )
        for i in range(min(config.workers, len(todo)))
    ]
    for worker in workers:
        worker.start()
    try:
        _watch(workers, messages, report)
    finally:
        for worker in workers:
            worker.terminate()  # it writes what it has
        for worker in workers:
            worker.join(timeout=STOP_S)


def _watch(workers: Seq[BaseProcess], messages: Any, report: Report) -> None:
    """Pass on progress until all workers have ended; raises the first one's error."""
    while True:
        ended = not any(worker.is_alive() for worker in workers)
        try:
            while True:
                kind, *values = messages.get(timeout=0 if ended else POLL_S)
                if kind == "error":
                    for worker in workers:
                        worker.terminate()
                    raise ERRORS.get(values[0], OutriderError)(values[1])
                report(*values)
        except queue.Empty:
            if ended:
                break
    failed = [worker.exitcode for worker in workers if worker.exitcode]
    if failed:
        raise OutriderError(
            f"{len(failed)} of {len(workers)} processes ended early (exit code {failed[0]}); what was written is "
            "intact: run the same command again to continue, with fewer --workers if memory ran out"
        )


def _work(
    number: int, target: str, todo: list[Todo], out: Path, config: CollectConfig, messages: Any, parent: int
) -> None:
    """One process: answers its share. Ends where its parent was killed."""

    def report(answers: int, tokens: int) -> None:
        messages.put(("progress", answers, tokens))
        if os.getppid() != parent:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; this one is told by its parent
    signal.signal(signal.SIGTERM, _stop)
    try:
        with load_engine(target, config) as llm:
            answer_all(llm, todo, CorpusWriter(out, str(number)), config, report)
    except KeyboardInterrupt:
        return
    except Exception as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        messages.put(("error", type(error).__name__, str(error)))
        messages.close()
        messages.join_thread()


def _stop(number: int, frame: FrameType | None) -> None:
    """End as at a keyboard interrupt, once: what is being written then is written to its end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt
