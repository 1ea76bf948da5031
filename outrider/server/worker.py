"""The engine's thread: takes jobs from a bounded queue that is fair between clients, and tells them what each
round brought. Nobody else touches the engine."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager

from outrider.core.errors import ConfigError, RequestError
from outrider.engine.events import Event
from outrider.engine.scoring import Scoring
from outrider.llm import LLM
from outrider.server.jobs import Ask, FairQueue, Job, QueueFull, Score, Text, TimeUp, Told, Unavailable
from outrider.server.watching import Finished, Observer, Round, Snapshot, State

log = logging.getLogger("outrider.server")


class Worker:
    """Owns an LLM in one thread. `place`, `submit`, `snapshot`, `drain` and `state` may be called from any other."""

    def __init__(
        self,
        load: Callable[[], LLM],
        max_queue: int,
        announce: Callable[[LLM], None] | None = None,
    ) -> None:
        """load: makes the LLM, in the worker's thread, while the server already answers /health.

        max_queue: most texts that wait. announce: called there once requests are taken.
        """
        self.max_queue = max_queue
        self.observers: list[Observer] = []
        """Told in the worker's thread; to be filled before `start`."""
        self.loaded, self.stopped = threading.Event(), threading.Event()
        self.served = False
        """Whether the model ever was ready."""
        self.failure: BaseException | None = None
        """What ended the thread before its time."""
        self._load, self._announce, self._llm = load, announce, None
        self._state: State = "loading"
        self._drain_until = math.inf
        self._changed = threading.Condition()
        self._queue: FairQueue[Text] = FairQueue()  # this and the next three change under _changed
        self._coming: Counter[str] = Counter()  # texts being made ready, by client
        self._jobs: dict[Job, None] = {}
        self._cancelled: list[Job] = []
        self._running: dict[int, Text] = {}  # the rest belongs to the thread alone
        self._scoring: list[tuple[Text, Scoring]] = []
        self._mail: dict[Job, list[tuple[int, Told]]] = {}
        self._mean_seconds = 1.0
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def state(self) -> State:
        """A thread that has gone, whatever took it, is a dead engine."""
        gone = self._state in ("ready", "loading") and self._thread.ident is not None and not self._thread.is_alive()
        return "dead" if gone else self._state

    @property
    def llm(self) -> LLM:
        """The model; to be read for what never changes (tokenizer, context, names). Unavailable unless it is ready."""
        if self._llm is None or self.state != "ready":
            raise self._unavailable()
        return self._llm

    @contextmanager
    def place(self, texts: int, client: str) -> Iterator[None]:
        """Keep places for texts while they are made ready; raises what `submit` would. Leave it, then submit them."""
        with self._changed:
            self._check_room(texts, client)
            self._coming[client] += texts
        try:
            yield
        finally:
            with self._changed:
                self._coming -= Counter({client: texts})

    def submit(self, asks: Seq[Ask], *, client: str = "", deadline: float = math.inf) -> Job:
        """Queue texts to write or score. Called in an event loop, whose job it is then.

        deadline: when they are given up, by time.perf_counter. QueueFull where they do not fit, Unavailable while
        nothing is taken, RequestError where they never would fit.
        """
        with self._changed:
            self._check_room(len(asks), client)
            job = Job(self._cancel, asks, client, deadline)
            self._jobs[job] = None
            for text in job.texts:
                self._queue.push(client, text)
            self._changed.notify()
        return job

    def drain(self, timeout: float) -> None:
        """Take nothing new; end when all that was taken is done, or after so many seconds."""
        with self._changed:
            self._drain_until = min(self._drain_until, time.perf_counter() + timeout)
            if self._state != "dead":
                self._state = "draining"
            self._changed.notify()

    def snapshot(self) -> Snapshot:
        with self._changed:
            waiting, running = len(self._queue), self._unfinished() - len(self._queue)
        pool = self._llm.engine.target.pool if self._llm else None
        return Snapshot(
            state=self.state,
            running=running,
            waiting=waiting,
            pages_used=pool.used if pool else 0,
            pages_total=pool.count if pool else 0,
        )

    def _check_room(self, texts: int, client: str) -> None:
        if self.state != "ready" or self._llm is None:
            raise self._unavailable()
        room = self.max_queue + self._llm.max_batch
        if texts > room:
            raise RequestError(f"{texts} texts at once; this server takes {room}: ask for fewer")
        taken = self._unfinished() + self._coming.total()
        if taken + texts > room and not self._is_owed(texts, client, room, taken):
            raise QueueFull(self._retry_after())

    def _is_owed(self, texts: int, client: str, room: int, taken: int) -> bool:
        """Whether a full queue still takes these: no client can keep another from its share, one that has
        had it excepted. Where many come for theirs at once there is an end to it too, at twice the room."""
        clients = {client, *self._coming, *(job.client for job in self._jobs)}
        own = self._coming[client] + sum(job.left for job in self._jobs if job.client == client)
        return own + texts <= room // len(clients) and taken + texts <= 2 * room

    def _unfinished(self) -> int:
        return len(self._queue) + len(self._running) + len(self._scoring)

    def _cancel(self, job: Job) -> None:
        with self._changed:
            if job in self._jobs:
                self._cancelled.append(job)
                self._changed.notify()

    def _retry_after(self) -> int:
        """Seconds until about half of what waits should have been served."""
        batch = self._llm.max_batch if self._llm else 1
        return max(1, min(60, math.ceil(self._mean_seconds * self._unfinished() / batch / 2)))

    def _unavailable(self) -> Unavailable:
        state = self.state
        if state == "dead":
            return Unavailable("the engine has stopped after a fault; the server must be restarted", "engine_dead", 30)
        if state == "draining":
            return Unavailable("the server is shutting down; ask another", "shutting_down", 5)
        return Unavailable("the model is still being loaded; try again soon", "model_loading", 5)

    # what follows runs in the thread

    def _run(self) -> None:
        try:
            self._llm = self._load()
            with self._changed:
                if self._state == "loading":
                    self._state = "ready"
            self.served = True
            self.loaded.set()
            self._say_ready(self._llm)
            while self._await_work():
                self._round(self._llm)
        except BaseException as error:  # whatever it was: those who wait must hear of it
            self.failure = error
            if isinstance(error, ConfigError):  # while loading: says itself what and where, and nothing of a prompt
                log.critical("the model cannot be loaded: %s", error)
            else:
                log.critical("the engine's thread ends", exc_info=error)
            with self._changed:
                self._state = "dead"
        finally:
            self._fail_all()
            self.loaded.set()
            self.stopped.set()

    def _say_ready(self, llm: LLM) -> None:
        try:
            if self._announce is not None:
                self._announce(llm)
        except Exception:  # such as a terminal that has gone
            log.exception("the server is ready, and could not say so")

    def _await_work(self) -> bool:
        """Wait for something to do. False: drained."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._state == "draining")
            return bool(self._jobs) and time.perf_counter() < self._drain_until

    def _round(self, llm: LLM) -> None:
        """Drop what nobody waits for, admit what has its turn, and move everything on."""
        self._drop_gone(llm, time.perf_counter())
        self._admit(llm)
        events = llm.engine.step()
        for event in events:
            text = self._running[event.seq_id]
            self._tell(text, event)
            if event.finish:
                del self._running[event.seq_id]
                self._finished(text, event)
        self._score_on(llm)
        for job, mail in self._mail.items():
            job.tell(mail)
        self._mail.clear()
        self._observe(Round(tuple(events)))

    def _drop_gone(self, llm: LLM, now: float) -> None:
        with self._changed:
            gone, self._cancelled = [job for job in self._cancelled if job in self._jobs], []
            late = [job for job in self._jobs if now > job.deadline]
        for job in late:
            job.fail(TimeUp())
        for job in dict.fromkeys((*gone, *late)):
            self._drop(llm, job)

    def _drop(self, llm: LLM, job: Job) -> None:
        """Free all that a job holds."""
        with self._changed:
            waiting = self._queue.remove(job.client, lambda text: text.job is job)
            self._jobs.pop(job, None)
        self._mail.pop(job, None)
        for text in waiting:
            self._finished(text, Event(-1, finish="cancelled"))
        for seq_id in [seq_id for seq_id, text in self._running.items() if text.job is job]:
            text, event = self._running.pop(seq_id), llm.engine.cancel(seq_id)
            self._finished(text, event or Event(seq_id, finish="cancelled"))
        for text, scoring in [each for each in self._scoring if each[0].job is job]:
            scoring.close()
            self._scoring.remove((text, scoring))
            self._finished(text, Event(-1, finish="cancelled"))

    def _admit(self, llm: LLM) -> None:
        """Fill the batch, a text of each client in turn."""
        while len(self._running) + len(self._scoring) < llm.max_batch:
            with self._changed:
                text = self._queue.pop()
            if text is None:
                return
            try:
                if isinstance(text.ask, Score):
                    self._scoring.append((text, llm.scoring(text.ask.tokens, text.ask.top, text.ask.salt)))
                else:
                    (seq_id,) = llm.engine.submit(text.ask)
                    self._running[seq_id] = text
                text.admitted = time.perf_counter()
            except RequestError as error:
                text.job.fail(error)
                self._finished(text, Event(-1, finish="error", error=str(error)))
                self._drop(llm, text.job)

    def _score_on(self, llm: LLM) -> None:
        """Score a piece of the first text there is to score; where no page is free, a running text must end first."""
        if not self._scoring:
            return
        text, scoring = self._scoring[0]
        try:
            if not scoring.done and not scoring.step() and not llm.engine.busy:
                raise RequestError("the cache has no room for this text; send a shorter one")
        except RequestError as error:
            self._end_scoring(text, scoring, Event(-1, finish="error", error=str(error)))
            return
        if scoring.done:
            self._end_scoring(text, scoring, tuple(scoring.logprobs))

    def _end_scoring(self, text: Text, scoring: Scoring, told: Told) -> None:
        scoring.close()
        self._scoring.pop(0)
        self._tell(text, told)
        self._finished(text, told if isinstance(told, Event) else Event(-1, finish="stop"))

    def _tell(self, text: Text, told: Told) -> None:
        self._mail.setdefault(text.job, []).append((text.index, told))

    def _finished(self, text: Text, event: Event) -> None:
        text.job.left -= 1
        if text.job.left == 0:
            with self._changed:
                self._jobs.pop(text.job, None)
        now = time.perf_counter()
        if text.admitted is not None:
            self._mean_seconds += (now - text.admitted - self._mean_seconds) / 16
        self._observe(Finished(text.job.client, event, text.job.arrived, text.admitted, text.job.record))

    def _observe(self, what: Finished | Round) -> None:
        for observer in self.observers:
            try:
                observer(what)
            except Exception:
                log.exception("an observer failed")

    def _fail_all(self) -> None:
        """Tell everyone still waiting that nothing more will come."""
        with self._changed:
            jobs, self._jobs, self._queue = list(self._jobs), {}, FairQueue()
        self._running.clear()
        self._scoring.clear()
        for job in jobs:
            job.fail(self._unavailable())
