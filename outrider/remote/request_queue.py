"""The queue before the replicas: bounded, and fair between clients. Belongs to one event loop."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable

from outrider.core.errors import RequestError
from outrider.server.queue.fair_queue import FairQueue, within_share
from outrider.server.queue.jobs import QueueFull


class Ticket:
    """A request's place in the queue: it waits until `turn` is done, and then runs until it is released."""

    def __init__(self, client: str, count: int) -> None:
        self.client, self.count = client, count
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.arrived = time.perf_counter()
        self.admitted: float | None = None


class RequestQueue:
    """Admits requests while their sequences fit into the capacity of the replicas; clients take turns."""

    def __init__(self, max_queue: int, capacity: Callable[[], int]) -> None:
        """max_queue: max sequences that wait. capacity: returns the max sequences that may run now."""
        self.max_queue, self.capacity = max_queue, capacity
        self.running = self.waiting = 0
        self._of_client: Counter[str] = Counter()
        self._queue: FairQueue[Ticket] = FairQueue()
        self._first: Ticket | None = None  # whose turn it is, once there is room
        self._mean_seconds = 1.0

    def submit(self, client: str, count: int) -> Ticket:
        """Queue a request of `count` sequences. QueueFull if they do not fit now, RequestError if they never do."""
        room, taken = self.max_queue + self.capacity(), self.running + self.waiting
        if count > room:
            raise RequestError(f"{count} texts at once; this server takes {room}: ask for fewer")
        clients = len({client, *self._of_client})
        share = within_share(count, self._of_client[client], room // clients, taken, room)
        if taken + count > room and not share:
            raise QueueFull(self._retry_after())
        ticket = Ticket(client, count)
        self._of_client[client] += count
        self.waiting += count
        self._queue.push(client, ticket)
        self.wake()
        return ticket

    def release(self, ticket: Ticket) -> None:
        """The request has ended, whether it waited or ran. Called once."""
        self._of_client -= Counter({ticket.client: ticket.count})
        if ticket.admitted is None:
            self.waiting -= ticket.count
            self._queue.remove(ticket.client, lambda other: other is ticket)
            self._first = None if self._first is ticket else self._first
            ticket.turn.cancel()
        else:
            self.running -= ticket.count
            self._mean_seconds += (time.perf_counter() - ticket.admitted - self._mean_seconds) / 16
        self.wake()

    def wake(self) -> None:
        """Admit the requests that there is room for; one larger than the capacity is admitted when none runs."""
        while not self.running or self.running < self.capacity():
            ticket = self._first or self._queue.pop()
            if ticket is None:
                return
            self._first = ticket
            if self.running and self.running + ticket.count > self.capacity():
                return
            self._first = None
            self.waiting -= ticket.count
            self.running += ticket.count
            ticket.admitted = time.perf_counter()
            ticket.turn.set_result(None)

    def fail_waiting(self, error: Exception) -> None:
        """End all waiting requests with this error."""
        waiting = [self._first] if self._first else []
        while (ticket := self._queue.pop()) is not None:
            waiting.append(ticket)
        self._first = None
        for ticket in waiting:
            ticket.turn.set_exception(error)

    def _retry_after(self) -> int:
        """Seconds until about half of the sequences, running and waiting, should have finished."""
        rounds = (self.running + self.waiting) / max(1, self.capacity())
        return max(1, min(60, math.ceil(self._mean_seconds * rounds / 2)))
