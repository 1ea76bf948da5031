"""The engine's thread: takes jobs from a bounded queue that is fair between clients, runs rounds, and delivers the
outputs. No other thread steps the engine."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager

from outrider.core.errors import ConfigError, ModelError, RequestError
from outrider.engine.client import EngineClient, PromptScoring
from outrider.engine.events import Event
from outrider.engine.prepare import LateWork
from outrider.engine.stats import Stats
from outrider.server.queue.fair_queue import FairQueue, within_share
from outrider.server.queue.jobs import (
    DeadlineExceeded,
    Job,
    JobOutput,
    JobOwner,
    JobRequest,
    JobSequence,
    QueueFull,
    ScoreRequest,
    Unavailable,
)
from outrider.server.queue.observers import EngineObserver, EngineState, QueueSnapshot, RoundFinished, SequenceFinished

LOGGER = logging.getLogger("outrider.server")


class EngineThread:
    """Owns an engine. `engine`, `reserve`, `submit`, `snapshot`, `drain` and `state` may be used from any thread."""

    def __init__(
        self,
        load: Callable[[], EngineClient],
        max_queue: int,
        announce: Callable[[EngineClient], None] | None = None,
    ) -> None:
        """load: makes the engine, on this thread, while the server already answers /health.

        max_queue: max sequences that wait. announce: called on this thread once requests are accepted.
        """
        self.max_queue = max_queue
        self.observers: list[EngineObserver] = []
        """Called on this thread; filled before `start`."""
        self.loaded, self.stopped = threading.Event(), threading.Event()
        self.was_ready = False
        """Whether the engine has ever been ready."""
        self.failure: BaseException | None = None
        """The error that ended the thread."""
        self._load, self._announce = load, announce
        self._engine: EngineClient | None = None
        self._state: EngineState = "loading"
        self._drain_until = math.inf
        self._changed = threading.Condition()
        self._queue: FairQueue[JobSequence] = FairQueue()  # this and the next three change under _changed
        self._reserved: Counter[str] = Counter()  # sequences being prepared, by client
        self._jobs: dict[Job, None] = {}
        self._cancelled: list[Job] = []
        self._running: dict[int, JobSequence] = {}  # the rest belongs to the thread alone
        self._scoring: list[tuple[JobSequence, PromptScoring]] = []
        self._outputs: dict[Job, list[tuple[int, JobOutput]]] = {}
        self._mean_seconds = 1.0
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def state(self) -> EngineState:
        """The state; `dead` also where the thread has ended without saying so."""
        gone = self._state in ("ready", "loading") and self._thread.ident is not None and not self._thread.is_alive()
        return "dead" if gone else self._state

    @property
    def engine(self) -> EngineClient:
        """The engine; other threads use its facts, tokenizer and validate. Unavailable unless it is ready."""
        if self._engine is None or self.state != "ready":
            raise self._unavailable()
        return self._engine

    @contextmanager
    def reserve(self, count: int, client: str) -> Iterator[None]:
        """Reserve room in the queue for sequences while they are prepared. Raises what `submit` would for them."""
        with self._changed:
            self._check_room(count, client)
            self._reserved[client] += count
        try:
            yield
        finally:
            with self._changed:
                self._reserved -= Counter({client: count})

    def submit(self, requests: Seq[JobRequest], owner: JobOwner | None = None) -> Job:
        """Queue sequences to generate or score. Called in an event loop, which then owns the job.

        QueueFull where they do not fit now, RequestError where they never would, Unavailable unless ready.
        """
        owner = owner or JobOwner()
        with self._changed:
            self._check_room(len(requests), owner.client)
            job = Job(self._cancel, requests, owner)
            self._jobs[job] = None
            for sequence in job.sequences:
                self._queue.push(owner.client, sequence)
            self._changed.notify()
        return job

    def drain(self, timeout: float) -> None:
        """Accept nothing new; stop when everything accepted has finished, or after `timeout` seconds."""
        with self._changed:
            self._drain_until = min(self._drain_until, time.perf_counter() + timeout)
            if self._state != "dead":
                self._state = "draining"
            self._changed.notify()

    def stats_of(self, seq_id: int) -> Stats | None:
        """The figures of a running sequence so far; None where it has ended, or the engine is not ready. Called on
        this thread."""
        return self._engine.stats_of(seq_id) if self._engine is not None and self.state == "ready" else None

    def snapshot(self) -> QueueSnapshot:
        with self._changed:
            waiting, running = len(self._queue), self._unfinished() - len(self._queue)
        engine = self._engine
        return QueueSnapshot(
            state=self.state,
            running=running,
            waiting=waiting,
            pages_used=engine.pages_used if engine else 0,
            pages_total=engine.facts.page_count if engine else 0,
            late_work=engine.late_work if engine else LateWork(),
        )

    def _check_room(self, count: int, client: str) -> None:
        if self.state != "ready" or self._engine is None:
            raise self._unavailable()
        room = self.max_queue + self._engine.facts.max_batch
        if count > room:
            raise RequestError(f"{count} texts at once; this server takes {room}: ask for fewer")
        taken = self._unfinished() + self._reserved.total()
        if taken + count > room and not self._within_share(count, client, room, taken):
            raise QueueFull(self._retry_after())

    def _within_share(self, count: int, client: str, room: int, taken: int) -> bool:
        """Whether a full queue still accepts these, since the client is within its share."""
        clients = {client, *self._reserved, *(job.client for job in self._jobs)}
        own = self._reserved[client] + sum(job.unfinished for job in self._jobs if job.client == client)
        return within_share(count, own, room // len(clients), taken, room)

    def _unfinished(self) -> int:
        return len(self._queue) + len(self._running) + len(self._scoring)

    def _cancel(self, job: Job) -> None:
        with self._changed:
            if job in self._jobs:
                self._cancelled.append(job)
                self._changed.notify()

    def _retry_after(self) -> int:
        """Seconds until about half of the unfinished sequences should have finished."""
        batch = self._engine.facts.max_batch if self._engine else 1
        return max(1, min(60, math.ceil(self._mean_seconds * self._unfinished() / batch / 2)))

    def _unavailable(self) -> Unavailable:
        state = self.state
        if state == "dead":
            return Unavailable("the engine has stopped after a fault; the server must be restarted", "engine_dead", 30)
        if state == "draining":
            return Unavailable("the server is shutting down; ask another", "shutting_down", 5)
        return Unavailable("the model is still being loaded; try again soon", "model_loading", 5)

    # everything below runs on the thread

    def _run(self) -> None:
        try:
            engine = self._load()
            self._engine = engine
            with self._changed:
                if self._state == "loading":
                    self._state = "ready"
            self.was_ready = True
            self.loaded.set()
            self._announce_ready(engine)
            while self._await_work():
                self._round(engine)
        except BaseException as error:  # any error: `_fail_all` then fails the jobs that wait
            self.failure = error
            if isinstance(error, ConfigError):  # from loading: it says what and where, and quotes no prompt
                LOGGER.critical("the model cannot be loaded: %s", error)
            else:
                LOGGER.critical("the engine's thread ends", exc_info=error)
            with self._changed:
                self._state = "dead"
        finally:
            self._fail_all()
            self.loaded.set()
            self.stopped.set()

    def _announce_ready(self, engine: EngineClient) -> None:
        try:
            if self._announce is not None:
                self._announce(engine)
        except Exception:  # such as a closed terminal
            LOGGER.exception("the server is ready, and could not say so")

    def _await_work(self) -> bool:
        """Wait for a job. False: drained, or the time to drain is up."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._state == "draining")
            return bool(self._jobs) and time.perf_counter() < self._drain_until

    def _round(self, engine: EngineClient) -> None:
        """Drop cancelled and late jobs, fill the batch, run one round, and deliver its outputs."""
        self._drop_ended(engine, time.perf_counter())
        self._admit(engine)
        events = engine.step()
        for event in events:
            sequence = self._running[event.seq_id]
            self._add_output(sequence, event)
            if event.finish:
                del self._running[event.seq_id]
                self._finished(sequence, event)
        self._score(engine)
        for job, outputs in self._outputs.items():
            job.deliver(outputs)
        self._outputs.clear()
        self._observe(RoundFinished(tuple(events)))

    def _drop_ended(self, engine: EngineClient, now: float) -> None:
        """Drop the jobs that were cancelled or whose deadline has passed."""
        with self._changed:
            cancelled, self._cancelled = [job for job in self._cancelled if job in self._jobs], []
            late = [job for job in self._jobs if now > job.owner.deadline]
        for job in late:
            job.fail(DeadlineExceeded())
        for job in dict.fromkeys((*cancelled, *late)):
            self._drop(engine, job)

    def _drop(self, engine: EngineClient, job: Job) -> None:
        """Free everything a job holds."""
        with self._changed:
            waiting = self._queue.remove(job.client, lambda sequence: sequence.job is job)
            self._jobs.pop(job, None)
        self._outputs.pop(job, None)
        for sequence in waiting:
            self._finished(sequence, Event(-1, finish="cancelled"))
        for seq_id in [seq_id for seq_id, sequence in self._running.items() if sequence.job is job]:
            sequence, event = self._running.pop(seq_id), engine.cancel(seq_id)
            self._finished(sequence, event or Event(seq_id, finish="cancelled"))
        for sequence, scoring in [each for each in self._scoring if each[0].job is job]:
            scoring.close()
            self._scoring.remove((sequence, scoring))
            self._finished(sequence, Event(-1, finish="cancelled"))

    def _admit(self, engine: EngineClient) -> None:
        """Fill the batch, one sequence of each client in turn."""
        while len(self._running) + len(self._scoring) < engine.facts.max_batch:
            with self._changed:
                sequence = self._queue.pop()
            if sequence is None:
                return
            try:
                if isinstance(sequence.request, ScoreRequest):
                    self._scoring.append((sequence, engine.score_prompt(sequence.request.checked)))
                else:
                    self._running[engine.submit(sequence.request)] = sequence
                sequence.admitted = time.perf_counter()
            except RequestError as error:
                sequence.job.fail(error)
                self._finished(sequence, _failed(error))
                self._drop(engine, sequence.job)

    def _score(self, engine: EngineClient) -> None:
        """Score the next tokens of the first prompt to score. Without a free page it waits for a sequence to end."""
        if not self._scoring:
            return
        sequence, scoring = self._scoring[0]
        try:
            if not scoring.done and not scoring.step() and not engine.busy:
                raise RequestError("the cache has no room for this text; send a shorter one")
        except RequestError as error:
            self._end_scoring(sequence, scoring, _failed(error))
            return
        if scoring.done:
            self._end_scoring(sequence, scoring, tuple(scoring.logprobs))

    def _end_scoring(self, sequence: JobSequence, scoring: PromptScoring, output: JobOutput) -> None:
        scoring.close()
        self._scoring.pop(0)
        self._add_output(sequence, output)
        self._finished(sequence, output if isinstance(output, Event) else Event(-1, finish="stop"))

    def _add_output(self, sequence: JobSequence, output: JobOutput) -> None:
        self._outputs.setdefault(sequence.job, []).append((sequence.index, output))

    def _finished(self, sequence: JobSequence, event: Event) -> None:
        job = sequence.job
        job.unfinished -= 1
        if job.unfinished == 0:
            with self._changed:
                self._jobs.pop(job, None)
        if sequence.admitted is not None:
            self._mean_seconds += (time.perf_counter() - sequence.admitted - self._mean_seconds) / 16
        self._observe(SequenceFinished(job.client, event, job.arrived, sequence.admitted))
        if job.owner.record is not None:
            job.owner.record.sequence_finished(event, job.arrived, sequence.admitted)

    def _observe(self, report: SequenceFinished | RoundFinished) -> None:
        for observer in self.observers:
            try:
                observer(report)
            except Exception:
                LOGGER.exception("an observer failed")

    def _fail_all(self) -> None:
        """Fail every job that has not finished."""
        with self._changed:
            jobs, self._jobs, self._queue = list(self._jobs), {}, FairQueue()
        self._running.clear()
        self._scoring.clear()
        for job in jobs:
            job.fail(self._unavailable())


def _failed(error: RequestError) -> Event:
    fault = "model" if isinstance(error, ModelError) else "request"
    return Event(-1, finish="error", error=str(error), at_fault=fault)
