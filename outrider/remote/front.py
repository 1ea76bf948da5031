"""The replicas, the queue before them, and the state that the server shows: a `Backend` without an engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI

from outrider.engine.events import Event
from outrider.engine.prepare import LateWork
from outrider.engine.stats import Stats
from outrider.remote.child import EngineChild
from outrider.remote.http_client import HttpClient
from outrider.remote.pool import ReplicaPool
from outrider.remote.replica import Replica
from outrider.remote.request_queue import RequestQueue, Ticket
from outrider.server.ops.logs import LOGGER
from outrider.server.queue.jobs import JobOwner, Unavailable
from outrider.server.queue.observers import EngineObserver, EngineState, QueueSnapshot, SequenceFinished

MAX_RUNNING = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontOptions:
    """What an operator decides about the replicas."""

    max_queue: int
    max_running: int = MAX_RUNNING
    """Max sequences that each replica is given at once."""
    key: str = ""
    """The API key of the replicas."""


class Front:
    """Owns the replicas, and the process of one where this server started it."""

    def __init__(
        self,
        replicas: Seq[Replica],
        options: FrontOptions,
        child: EngineChild | None = None,
        announce: Callable[[Front], None] | None = None,
    ) -> None:
        """announce: called once, when the first replica is ready."""
        self.options, self.child = options, child
        self.pool = ReplicaPool(replicas, self._changed)
        self.queue = RequestQueue(options.max_queue, lambda: options.max_running * max(1, len(self.pool.usable())))
        self.observers: list[EngineObserver] = []
        self.stopped, self.was_ready = threading.Event(), False
        self.failure: BaseException | None = None
        self._announce = announce
        self.client = HttpClient(options.key)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining = False
        self._drain_timer: asyncio.TimerHandle | None = None

    @property
    def state(self) -> EngineState:
        if self._draining:
            return "draining"
        if self.failure is not None:
            return "dead"
        if self.pool.usable():
            return "ready"
        return "dead" if self.was_ready else "loading"

    def start(self) -> None:
        """Does nothing: `lifespan` starts polling, which needs the event loop."""

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Poll the replicas, and run the child, while the application serves."""
        self._loop = asyncio.get_running_loop()
        self.pool.start(self.client)
        if self.child is not None:
            self.child.start(self._child_exited)
        try:
            yield
        finally:
            self.stopped.set()
            await self.pool.stop()
            if self.child is not None:
                await self.child.stop()
            self.client.close()

    def drain(self, timeout: float) -> None:
        if self._loop is None:
            self.stopped.set()
        else:
            self._loop.call_soon_threadsafe(self._begin_drain, timeout)

    def snapshot(self) -> QueueSnapshot:
        running, waiting = self.queue.running, self.queue.waiting
        return QueueSnapshot(self.state, running, waiting, pages_used=0, pages_total=0, late_work=LateWork())

    def stats_of(self, seq_id: int) -> Stats | None:
        return None  # replicas tell them with the last chunk

    def check_ready(self) -> None:
        """Unavailable, with the reason, unless requests are taken."""
        if self.state != "ready":
            raise self.unavailable()

    def unavailable(self) -> Unavailable:
        if self.state == "draining":
            return Unavailable("the server is shutting down; ask another", "shutting_down", 5)
        if self.was_ready:
            return Unavailable("no replica can be reached; they are polled, try again soon", "engine_unavailable", 2)
        return Unavailable("the model is still being loaded; try again soon", "model_loading", 5)

    def finish(self, ticket: Ticket, owner: JobOwner, events: Seq[Event]) -> None:
        """A request has ended: free its place in the queue, and report each of its sequences to the observers."""
        self.queue.release(ticket)
        for event in events:
            for observer in self.observers:
                observer(SequenceFinished(owner.client, event, ticket.arrived, ticket.admitted))
            if owner.record is not None:
                owner.record.sequence_finished(event, ticket.arrived, ticket.admitted)
        if self._draining and not self.queue.running + self.queue.waiting:
            self.stopped.set()

    def _begin_drain(self, timeout: float) -> None:
        self._draining = True
        if not self.queue.running + self.queue.waiting:
            self.stopped.set()
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        self._drain_timer = asyncio.get_running_loop().call_later(timeout, self._end_drain)

    def _end_drain(self) -> None:
        """The time to drain is up: end the requests that wait and the responses that are open."""
        self.queue.fail_waiting(self.unavailable())
        for replica in self.pool.replicas:
            replica.cut_all(self.unavailable())
        self.stopped.set()

    def _changed(self) -> None:
        """A replica's state has changed."""
        if not self.was_ready and self.pool.usable():
            self.was_ready = True
            if self._announce is not None:
                try:
                    self._announce(self)
                except Exception:  # such as a closed terminal
                    LOGGER.exception("the server is ready, and could not say so")
        self.queue.wake()

    def _child_exited(self, replica: Replica, error: Exception) -> bool:
        """The child has ended; returns whether it is to be started again."""
        self.pool.set_state(replica, "dead", str(error))
        if self.was_ready:
            return not self._draining
        self.failure = error
        self.stopped.set()
        return False
